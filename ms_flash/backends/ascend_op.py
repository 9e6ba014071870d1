"""The ops as MindSpore registers them for Ascend, from ops.yaml. Names, order and dtypes are those of the OpDefs in
op_impl/ascendc/op_host/cann, which tests/ascendc/test_registration.py compares with them."""

from __future__ import annotations

import itertools
import re

from .. import op_table

_FORMATS = {"float16": "F16_Default", "bfloat16": "BF16_Default", "float32": "F32_Default", "bool": "BOOL_Default",
            "uint8": "U8_Default", "int32": "I32_Default", "int64": "I64_Default"}
_STATISTICS = ("lse", "row_max", "row_sum")
_GRADIENTS = {"dsinks": "sinks", "dbias": "bias"}   # outputs of the dtype of an input; all others have the query's


def api_name(op: str) -> str:
    """The aclnn function that CANN generates for `op`."""
    return f"aclnn{op}"


def snake_case(op: str) -> str:
    """The name that CANN derives from an op for its kernel and its files."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", op).lower()


def entries(op: str) -> list[dict]:
    """The inputs of `op` as ops.yaml describes them."""
    table = op_table.table()
    return [slot for group in table["ops"][op]["inputs"] for slot in table[group]]


def dtype_rows(op: str) -> list[tuple[str, ...]]:
    """The combinations of dtypes that `op` takes on Ascend: one dtype per input and output, in the order in which its
    OpDef lists them."""
    sets, rows = op_table.table()["dtypes"], []
    data = op_table.table()["backends"]["ascend"]["dtypes"]
    inputs, outputs = op_table.slots(op)
    varying = lambda name, among: among if name in inputs else (None,)
    # query varies fastest, then mask or lengths, bias or blocks, and sinks: the bits of the number of a combination
    second = varying("attn_mask", sets["mask"]) if "attn_mask" in inputs else varying("cache_seqlens", sets["lengths"])
    third = varying("bias", sets["bias"]) if "bias" in inputs else varying("block_table", sets["lengths"])
    for sinks, bias, mask, query in itertools.product(varying("sinks", sets["bias"]), third, second, data):
        of = {"data": query, "same": query, "bias": query, "mask": mask, "float": "float32", "int64": "int64",
              "keep": "uint8", "lengths": "int64"}
        row = {e["name"]: of[e["dtypes"]] for e in entries(op)}
        row.update(bias=query if bias == "query" else bias, sinks=query if sinks == "query" else sinks)
        row.update(cache_seqlens=mask, block_table=bias)
        result = lambda name: row[_GRADIENTS[name]] if name in _GRADIENTS else query    # noqa: B023 used at once
        rows.append((*(row[name] for name in inputs),
                     *("float32" if name in _STATISTICS else result(name) for name in outputs)))
    return rows


def registration(op: str) -> dict:
    """CustomRegOp information for `op`."""
    from mindspore.ops import CustomRegOp, DataType

    info = CustomRegOp(api_name(op))
    for index, entry in enumerate(entries(op)):
        info.input(index, entry["name"], "optional" if entry.get("optional") else "required")
    info.attr("spec", "required", "str")
    for index, name in enumerate(op_table.slots(op)[1]):
        info.output(index, name, "required")
    for row in dtype_rows(op):
        info.dtype_format(*(getattr(DataType, _FORMATS[dtype]) for dtype in row))
    return info.target("Ascend").get_op_info()
