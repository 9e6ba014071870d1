"""One node ``ai.msflash::FlashAttention`` as a model, from a call in the words of `ms_flash/reference.py`."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16,
         BFLOAT16: TensorProto.BFLOAT16, np.dtype(bool): TensorProto.BOOL}


def attributes(call):
    """The attributes of the node for the options of a reference call."""
    return {"is_causal": 0, "scale": 0.0 if call.get("scale") is None else float(call["scale"]),
            "softcap": float(call.get("softcap", 0.0)), "left_window_size": call.get("left", -1),
            "right_window_size": call.get("right", -1), "causal_alignment": int(call.get("align") != "top_left")}


def mask_of(call):
    """The node's one mask: the call's discarded positions, or its bias with -inf there."""
    masked, bias = call.get("attn_mask"), call.get("bias")
    if bias is None:
        return None if masked is None else ~masked
    return bias if masked is None else np.where(masked, np.array(-np.inf, bias.dtype), bias)


def inputs_of(call):
    """The arrays to feed, by name."""
    feeds = {"Q": call["q"], "K": call["k"], "V": call["v"], "attn_mask": mask_of(call)}
    return {name: x for name, x in feeds.items() if x is not None}


def model(dtype, mask_dtype=None, mask_rank=4, lse=True, functions=(), **attrs):
    """A model with symbolic lengths. bfloat16, which NumPy does not have, comes in and goes out as float32."""
    dtype = np.dtype(dtype)
    nodes, given, names = [], [], []
    types = {"Q": dtype, "K": dtype, "V": dtype}
    axes = {"Q": ["B", "H", "S", "D"], "K": ["B", "G", "T", "D"], "V": ["B", "G", "T", "E"],
            "attn_mask": mask_rank * [None]}
    if mask_dtype is not None:
        types["attn_mask"] = np.dtype(mask_dtype)
    for name, kind in types.items():
        outside = np.dtype(np.float32) if kind == BFLOAT16 else kind
        given.append(helper.make_tensor_value_info(name, TYPES[outside], axes[name]))
        if kind != outside:
            nodes.append(helper.make_node("Cast", [name], [name + "_"], to=TYPES[kind]))
            name += "_"
        names.append(name)
    names += [""] * (4 - len(names))
    outside = np.dtype(np.float32) if dtype == BFLOAT16 else dtype
    inner = "Y" if dtype == outside else "Y_"
    nodes.append(helper.make_node("FlashAttention", names, [inner, "LSE" if lse else ""], "attention",
                                  domain="ai.msflash", **attrs))
    if inner != "Y":
        nodes.append(helper.make_node("Cast", [inner], ["Y"], to=TYPES[outside]))
    outputs = [helper.make_tensor_value_info("Y", TYPES[outside], 4 * [None])]
    if lse:
        outputs.append(helper.make_tensor_value_info("LSE", TensorProto.FLOAT, 3 * [None]))
    return helper.make_model(
        helper.make_graph(nodes, "attention", given, outputs), functions=functions, ir_version=10,
        opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("ai.msflash", 1)])


def model_for(call, **options):
    mask = mask_of(call)
    kind = {} if mask is None else {"mask_dtype": mask.dtype, "mask_rank": mask.ndim}
    return model(call["q"].dtype, **kind, **attributes(call), **options)


def feeds_for(call):
    """`inputs_of`, with bfloat16 as float32."""
    return {name: x.astype(np.float32) if x.dtype == BFLOAT16 else x for name, x in inputs_of(call).items()}


def save(proto):
    onnx.checker.check_model(proto, full_check=False)
    return proto.SerializeToString()
