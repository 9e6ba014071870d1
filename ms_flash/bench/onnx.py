"""``bench --suite onnx``: the node in ONNX Runtime, with the custom-op library against what runs without it."""

from __future__ import annotations

import argparse
import dataclasses
import statistics

from .cases import CASES
from .worker import interleaved

# of a row: the function that every exported model carries, or ONNX's own Attention, as this runtime implements it
PEERS = ("function", "attention")
COLUMNS = ("shape", "batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "dtype", "causal", "threads", "peer",
           "ours_ms", "peer_ms", "ratio", "ratio_low", "ratio_high", "note")
ONNX_CASES = tuple(name for name, case in CASES.items() if not case.lengths)
QUICK = ("s512", "s1024", "gqa", "decode-gqa")
OPSET, IR_VERSION = 23, 10      # the first with Attention


class OnnxPlan:
    """What one call of the command measures. More than 1 in a ratio = the library is faster."""

    columns = COLUMNS

    def __init__(self, args: argparse.Namespace, threads: list, progress):
        self.seconds, self.rounds = (args.seconds or 1.0, 3) if args.quick else (args.seconds or 3.0, 5)
        shapes = args.shapes or (QUICK if args.quick else ONNX_CASES)
        dtypes = args.dtypes or (("float32",) if args.quick else ("float32", "float16"))
        self.problems = [(CASES[name], dtype, causal, n) for name in shapes for dtype in dtypes
                         for causal in CASES[name].causal for n in threads]
        self.progress = progress(len(self.problems))

    def rows(self):
        """Yields a dict per row of the table."""
        for case, dtype, causal, threads in self.problems:
            self.progress.show(f"{case.name} {dtype} {'causal' if causal else 'full'} {threads} threads")
            times = measure(case, dtype, causal, threads, self.seconds, self.rounds)
            self.progress.step()
            head = {column: dataclasses.asdict(case).get(column) for column in COLUMNS[1:7]}
            for peer in PEERS:
                yield {"shape": case.name, **head, "dtype": dtype, "causal": int(causal), "threads": threads,
                       "peer": peer, **compare(times["library"], times[peer])}

    @staticmethod
    def failed(row):
        """Whether the library did not run."""
        return row["ours_ms"] is None


def model(case, dtype, causal, attention=False):
    """The node with its function, or ``Attention``, as bytes."""
    from onnx import TensorProto, helper

    from ..onnx_export import body, schema

    kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}[dtype]
    shapes = {"Q": (case.batch, case.heads, case.q_len, case.head_dim),
              "K": (case.batch, case.kv_heads, case.kv_len, case.head_dim),
              "V": (case.batch, case.kv_heads, case.kv_len, case.head_dim)}
    functions = []
    if attention:
        node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], is_causal=int(causal))
    else:
        node = helper.make_node(schema.OP_TYPE, ["Q", "K", "V", ""], ["Y", ""], domain=schema.DOMAIN,
                                **{**schema.DEFAULTS, "is_causal": int(causal)})
        functions = [body.function(body.Kind("", causal, False, case.heads != case.kv_heads), OPSET)]
    graph = helper.make_graph([node], "attention", [helper.make_tensor_value_info(name, kind, shape)
                                                    for name, shape in shapes.items()],
                              [helper.make_tensor_value_info("Y", kind, shapes["Q"])])
    versions = [helper.make_opsetid("", OPSET), helper.make_opsetid(schema.DOMAIN, schema.SINCE_VERSION)]
    return helper.make_model(graph, functions=functions, ir_version=IR_VERSION, opset_imports=versions
                             ).SerializeToString(), shapes


def measure(case, dtype, causal, threads, seconds, rounds):
    """Seconds per round of the library and its peers; the error text of what does not run."""
    import numpy as np
    import onnxruntime

    from ..onnx_export import register

    results, steps = {}, {}
    for name in ("library", *PEERS):
        try:
            settings = onnxruntime.SessionOptions()
            settings.intra_op_num_threads, settings.log_severity_level = threads, 4
            # a pool that waits actively after its run would take the cores of the next session
            settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
            if name == "library":
                register(settings)
            proto, shapes = model(case, dtype, causal, attention=name == "attention")
            session = onnxruntime.InferenceSession(proto, settings, providers=["CPUExecutionProvider"])
            rng = np.random.default_rng(0)
            feeds = {key: rng.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}
            steps[name] = lambda session=session, feeds=feeds: session.run(None, feeds)
            steps[name]()
        except Exception as error:  # what a peer raises for what it does not support is not ours to list
            results[name] = str(error).strip().splitlines()[0][:160]
            steps.pop(name, None)
    return {**results, **interleaved(steps, seconds, rounds)}


def compare(ours, theirs) -> dict:
    """The measured columns of a row; ratios are of rounds: their median and quartiles."""
    columns = dict.fromkeys(COLUMNS[11:])
    columns["note"] = "; ".join(x for x in (ours, theirs) if isinstance(x, str))
    for column, times in (("ours_ms", ours), ("peer_ms", theirs)):
        if not isinstance(times, str):
            columns[column] = round(1e3 * statistics.median(times), 3)
    if columns["ours_ms"] and columns["peer_ms"]:
        low, middle, high = statistics.quantiles([b / a for a, b in zip(ours, theirs)], n=4, method="inclusive")
        columns.update(ratio_low=round(low, 2), ratio=round(middle, 2), ratio_high=round(high, 2))
    return columns
