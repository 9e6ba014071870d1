"""What is measured: the benchmark shapes and the suites, as tables."""

from __future__ import annotations

import dataclasses

from ..shape import Shape


@dataclasses.dataclass(frozen=True)
class Case(Shape):
    """One problem size. With `lengths`, sequences of these lengths lie end to end, `q_len` = `kv_len` is the sum; with
    a `window`, both lengths are the same. A step is `calls` attentions in turn, each with keys and values of its own,
    like the layers of a model: launching a graph is no part of attention (the case "call" measures it)."""

    directions: tuple[str, ...] = ("fwd", "fwd+bwd")
    causal: tuple[bool, ...] = (False, True)
    lengths: tuple[int, ...] = ()
    window: int = -1    # keys before each query that it sees, causal; -1: all
    peers: tuple[str, ...] = ()     # instead of those of the suite
    calls: int = 1

    def flops(self, direction: str, causal: bool) -> float:
        """Multiplications and additions of the products: 4 D per head and pair of query and key that see each other in
        the forward, 10 D more in the backward, which computes the scores again."""
        pairs = sum(q * k if not causal else q * (q + 1) / 2 + q * (k - q)
                    for q, k in ([(n, n) for n in self.lengths] or [(self.q_len, self.kv_len)]))
        if self.window >= 0:
            pairs = self.q_len * (self.window + 1) - self.window * (self.window + 1) / 2
        return (4 if direction == "fwd" else 14) * self.batch * self.heads * self.head_dim * pairs

    def read_bytes(self, itemsize: int) -> float:
        """Of keys and values: what bounds a few queries."""
        return 2 * self.batch * self.kv_heads * self.kv_len * self.head_dim * itemsize


_PACKED = (37, 1500, 150, 1023, 300, 77, 512)
_INFERENCE = {"directions": ("fwd",), "causal": (False,)}  # one query sees the whole cache: causal changes nothing

CASES = {case.name: case for case in (
    #     name         batch heads kv_heads q_len kv_len head_dim
    Case("s512",        1,    8,    8,      512,  512,   64, calls=8),
    Case("s1024",       1,    8,    8,      1024, 1024,  64, calls=2),
    Case("s2048",       1,    8,    8,      2048, 2048,  64),
    Case("s4096",       1,    8,    8,      4096, 4096,  64),
    Case("bert",        4,    12,   12,     128,  128,   64, calls=8),
    Case("h32d128",     1,    32,   32,     1024, 1024,  128),
    Case("gqa",         1,    32,   8,      1024, 1024,  128),
    Case("decode",      1,    16,   16,     1,    8192,  128, calls=4, **_INFERENCE),
    Case("decode-gqa",  1,    32,   8,      1,    8192,  128, calls=4, **_INFERENCE),
    Case("odd",         1,    8,    8,      3333, 3333,  80),
    Case("varlen",      1,    8,    8,      sum(_PACKED), sum(_PACKED), 64, lengths=_PACKED),
    Case("window256",   1,    8,    8,      4096, 4096,  64, causal=(False,), window=256, peers=("ms_flash-full",)),
    # so small that a call costs what it takes to make one
    Case("call",        1,    1,    1,      16,   16,    16, peers=("mindspore-op",), **_INFERENCE),
)}


@dataclasses.dataclass(frozen=True)
class Suite:
    """Cases, dtypes and peers of one ``--suite``; `quick` names what ``--quick`` keeps of them."""

    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    peers: tuple[str, ...]
    quick_peers: tuple[str, ...]
    quick_cases: tuple[str, ...]
    quick_dtypes: tuple[str, ...] = ("float32",)


SUITES = {
    "cpu": Suite(cases=tuple(CASES), dtypes=("float32", "float16", "bfloat16"),
                 peers=("mindspore-jit", "mindspore-pynative", "torch", "ort-mha", "ort-attention"),
                 quick_peers=("mindspore-jit", "mindspore-pynative"),
                 quick_cases=("s512", "s1024", "bert", "decode-gqa", "varlen", "window256", "call")),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """What the rows of the suite cpu that agree with `where` have to reach in `column`."""

    text: str
    column: str
    least: float
    where: dict

    def holds_for(self, row: dict) -> bool:
        """Whether it says something of this row."""
        return all(row[column] in allowed for column, allowed in self.where.items())


_SEVERAL = range(2, 4097)   # threads
_D64, _D128, _HALF = ("s512", "s1024", "s2048", "s4096"), ("h32d128", "gqa"), ("float16", "bfloat16")


def _targets(text, shapes, dtypes, direction, causal, torch=None, jit=None, limit=None):
    """With all cores against PyTorch and MindSpore's compiled graph, and with one in percent of the limit."""
    where = {"shape": shapes, "dtype": dtypes, "direction": (direction,), "causal": causal}
    rows = [("ratio", torch, {"peer": ("torch",), "threads": _SEVERAL}),
            ("ratio", jit, {"peer": ("mindspore-jit",), "threads": _SEVERAL}),
            ("of_limit", limit, {"peer": ("mindspore-jit",), "threads": (1,)})]
    return [Target(text, column, least, {**where, **more}) for column, least, more in rows if least]


TARGETS = (
    *_targets("forward", _D64, ("float32",), "fwd", (0,), torch=1.25, jit=2, limit=78),
    *_targets("forward causal", _D64[1:], ("float32",), "fwd", (1,), torch=1.7, jit=4, limit=68),
    *_targets("forward causal", _D64[:1], ("float32",), "fwd", (1,), torch=2, jit=4, limit=68),
    *_targets("forward + backward", _D64, ("float32",), "fwd+bwd", (0,), torch=1.35, jit=2.5, limit=76),
    *_targets("forward + backward causal", _D64, ("float32",), "fwd+bwd", (1,), torch=1.8, jit=4.5, limit=66),
    *_targets("head_dim 128", _D128, ("float32",), "fwd", (0,), torch=1.1, jit=1.8, limit=74),
    *_targets("head_dim 128", _D128, ("float32",), "fwd+bwd", (0,), torch=1.1, jit=1.8, limit=74),
    *_targets("head_dim 128 causal", _D128, ("float32",), "fwd", (1,), torch=1.5, jit=1.8, limit=66),
    *_targets("head_dim 128 causal", _D128, ("float32",), "fwd+bwd", (1,), torch=1.5, jit=1.8, limit=66),
    *_targets("16-bit forward", _D64, ("bfloat16",), "fwd", (0, 1), torch=1.4),
    *_targets("16-bit forward", _D64, ("float16",), "fwd", (0, 1), torch=2.2),
    *_targets("16-bit forward + backward", _D64, _HALF, "fwd+bwd", (0, 1), torch=5),
    *_targets("decoding", ("decode", "decode-gqa"), ("float32",), "fwd", (0,), torch=1.4, jit=1.3, limit=70),
    *_targets("decoding, 16-bit", ("decode", "decode-gqa"), _HALF, "fwd", (0,), torch=3.5, limit=70),
    Target("window of 256", "ratio", 6, {"shape": ("window256",), "direction": ("fwd",), "threads": _SEVERAL}),
    Target("a call takes 1.5 times one of MindSpore's own at most", "ratio", 0.67, {"shape": ("call",)}),
    *_targets("odd sizes", ("odd", "varlen", "bert"), ("float32",), "fwd", (0, 1), torch=1.3, jit=1.8),
    *_targets("odd sizes", ("odd", "varlen", "bert"), ("float32",), "fwd+bwd", (0, 1), torch=1.3, jit=1.8),
)


@dataclasses.dataclass(frozen=True)
class Net:
    """One model of ``--suite fusion``. `packed`: query, key and value come from one projection. `mask`: "causal" (the
    lowest number above the diagonal), "padding" (-1e4 added) or ``None``."""

    name: str
    batch: int
    length: int
    width: int
    heads: int
    packed: bool
    mask: str | None
    layers: int = 2
    attention: bool = True  # False: the values are handed on


NETS = {net.name: net for net in (
    Net("gpt2-small", 1, 1024, 768, 12, packed=True, mask="causal"),
    Net("bert-base", 2, 512, 768, 12, packed=False, mask="padding"),
    Net("vit-s", 8, 197, 384, 6, packed=True, mask=None),
)}
