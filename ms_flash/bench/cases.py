"""What is measured: the benchmark shapes and the suites, as tables."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem size. With `lengths`, sequences of these lengths lie end to end, `q_len` = `kv_len` is the sum."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    directions: tuple[str, ...] = ("fwd", "fwd+bwd")
    causal: tuple[bool, ...] = (False, True)
    lengths: tuple[int, ...] = ()


_PACKED = (37, 1500, 150, 1023, 300, 77, 512)
_INFERENCE = {"directions": ("fwd",), "causal": (False,)}  # one query sees the whole cache: causal changes nothing

CASES = {case.name: case for case in (
    #     name         batch heads kv_heads q_len kv_len head_dim
    Case("s512",        1,    8,    8,      512,  512,   64),
    Case("s1024",       1,    8,    8,      1024, 1024,  64),
    Case("s2048",       1,    8,    8,      2048, 2048,  64),
    Case("s4096",       1,    8,    8,      4096, 4096,  64),
    Case("bert",        4,    12,   12,     128,  128,   64),
    Case("h32d128",     1,    32,   32,     1024, 1024,  128),
    Case("gqa",         1,    32,   8,      1024, 1024,  128),
    Case("decode",      1,    16,   16,     1,    8192,  128, **_INFERENCE),
    Case("decode-gqa",  1,    32,   8,      1,    8192,  128, **_INFERENCE),
    Case("odd",         1,    8,    8,      3333, 3333,  80),
    Case("varlen",      1,    8,    8,      sum(_PACKED), sum(_PACKED), 64, lengths=_PACKED),
)}


@dataclasses.dataclass(frozen=True)
class Suite:
    """Cases, dtypes and peers of one ``--suite``; `quick` names what ``--quick`` keeps of the cases and dtypes."""

    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    peers: tuple[str, ...]
    quick_cases: tuple[str, ...]
    quick_dtypes: tuple[str, ...] = ("float32",)


SUITES = {
    "cpu": Suite(cases=tuple(CASES), dtypes=("float32", "float16", "bfloat16"),
                 peers=("mindspore-jit", "mindspore-pynative"),
                 quick_cases=("s512", "s1024", "bert", "decode-gqa", "varlen")),
}


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


NETS = {net.name: net for net in (
    Net("gpt2-small", 1, 1024, 768, 12, packed=True, mask="causal"),
    Net("bert-base", 2, 512, 768, 12, packed=False, mask="padding"),
    Net("vit-s", 8, 197, 384, 6, packed=True, mask=None),
)}
