"""A model of one node, and its inputs, from a call in the terms of `reference.forward`."""

from __future__ import annotations

import numpy as np
import onnx
from ms_flash.onnx_export import model, profiles
from ms_flash.onnx_export.builder import Builder, Tensor

_OPTIONS = {"q", "k", "v", "scale", "softcap", "left", "right", "align", "attn_mask", "bias"}


def model_of(call, profile="portable", opset=None, free=True):
    """(ModelProto, feeds) for one attention; `free`: without fixed lengths."""
    assert set(call) <= _OPTIONS, call
    chosen = profiles.make(profile, opset)
    b = Builder(chosen.opset)
    b.profile = chosen
    arrays = {"Q": call["q"], "K": call["k"], "V": call["v"]}
    mask, bias = call.get("attn_mask"), call.get("bias")
    if bias is not None:
        arrays["mask"] = bias if mask is None else np.where(mask, np.asarray(-np.inf, bias.dtype), bias)
    elif mask is not None:
        arrays["mask"] = ~np.asarray(mask).astype(bool)
    tensors, inputs = {}, []
    for name, array in arrays.items():
        heads = array.shape[1] if name in "QKV" else -1
        shape = tuple(heads if i == 1 and name in "QKV" else -1 if free and (name in "QKV" or n > 1) else n
                      for i, n in enumerate(array.shape))
        if name in "QKV":
            shape = (*shape[:3], array.shape[3])
        tensors[name] = Tensor(str(array.dtype), shape, b.unique(name))
        inputs.append((tensors[name], [n if n >= 0 else f"{name}{i}" for i, n in enumerate(shape)]))
    right = call.get("right", -1)
    attributes = {"scale": call.get("scale") or 0.0, "softcap": call.get("softcap", 0.0),
                  "is_causal": int(right == 0), "left_window_size": call.get("left", -1),
                  "right_window_size": right if right > 0 else -1,
                  "causal_alignment": int(call.get("align", "bottom_right") == "bottom_right")}
    results = chosen.attend(b, profiles.Attention(tensors["Q"], tensors["K"], tensors["V"], tensors.get("mask"),
                                                  attributes))
    for tensor, name in zip(results, ("out", "lse")):
        done = b.op("Identity", tensor)
        done.name = b.block.nodes[-1].outputs[0] = name
        b.block.outputs.append(done)
    model.prune(b.block, set())
    constants = [model.tensor_proto(t, name) for name, t in b.initializers.items()]
    graph = model.graph_proto(b.block, "node", inputs, constants)
    proto = onnx.helper.make_model(graph, functions=chosen.functions(), ir_version=model.IR_VERSIONS[chosen.opset],
                                   opset_imports=[onnx.helper.make_opsetid("", chosen.opset),
                                                  onnx.helper.make_opsetid("ai.msflash", 1)])
    onnx.checker.check_model(proto, full_check=True)
    return proto, arrays
