"""The Ascend backend: custom operators installed into CANN, called through aclnn.

Its pieces are checked against each other (tests/ascendc/test_registration.py), but it never ran on an NPU.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import mindspore
from mindspore import ops
from mindspore.ops import signature as sig

from .. import op_table
from ..kvcache_spec import KVCACHE_SLOTS
from ..spec import Arg, value_error
from .ascend_op import api_name, entries, registration, snake_case
from .base import Backend, no_gradient

VENDOR = "ms_flash"
_PATH = "ASCEND_CUSTOM_OPP_PATH"
ROW = 16    # head dims are multiples of this in the kernels


def packages() -> list[Path]:
    """Folders where an operator package of ours may be, in the order in which they count."""
    listed = [Path(p) for p in os.environ.get(_PATH, "").split(":") if p]
    own = [Path(__file__).resolve().parent.parent / "lib" / "vendors" / VENDOR,
           op_table.path().parent / "ascendc" / "build_out" / "packages" / "vendors" / VENDOR]
    opp = os.environ.get("ASCEND_OPP_PATH")
    return listed + ([Path(opp) / "vendors" / VENDOR] if opp else []) + own


def lacks(package: Path) -> list[str]:
    """What `package` has to hold for MindSpore to find our ops in it, and does not."""
    wanted = ["op_api/lib/libcust_opapi.so"]
    wanted += [f"op_api/include/aclnn_{snake_case(op)}.h" for op in op_table.table()["backends"]["ascend"]["ops"]]
    return [file for file in wanted if not (package / file).exists()]


def prepare() -> None:
    """Puts our operator package into ASCEND_CUSTOM_OPP_PATH, and the block sizes into MS_FLASH_PRESETS, where the host
    tiling inside CANN reads them. On import: MindSpore looks at the path when the first operator runs."""
    found = next((folder for folder in packages() if folder.is_dir() and not lacks(folder)), None)
    listed = [p for p in os.environ.get(_PATH, "").split(":") if p]
    if found is not None and str(found) not in listed:
        os.environ[_PATH] = ":".join([str(found), *listed])
    presets = op_table.path().parent / "ascendc" / "presets.yaml"
    if presets.exists():
        os.environ.setdefault("MS_FLASH_PRESETS", str(presets))


prepare()


class _InGraph(ops.Custom):
    """In PyNative too, the op runs as a graph: MindSpore 2.10 launches an aclnn Custom of at most 12 arrays, none of
    them ``None``, from PyNative, while a graph takes any."""

    def __call__(self, *args):
        return self._compiled(*args)

    @functools.cached_property
    def _compiled(self):
        custom = self

        def run(*args):
            return custom(*args)

        return mindspore.jit(run, jit_level="O0")


class _Writing(_InGraph):
    """The op that appends to caches. As on the CPU (aot.py), the signature and the attribute side_effect_mem tell a
    graph that it writes to Parameters; the last argument is the attribute."""

    __mindspore_signature__ = (*(
        sig.make_sig(entry["name"], sig.sig_rw.RW_WRITE if entry.get("note") == "written" else sig.sig_rw.RW_READ)
        for entry in entries("MsFlashKvCache")), sig.make_sig("spec"))


class AscendBackend(Backend):
    """Ascend C kernels as aclnn custom operators."""

    name = "ascend"
    dynamic_shape = False
    takes_empty = False
    copied = "a Tensor, which the graph that runs the op may copy"

    def check(self, op, spec):
        super().check(op, spec)
        if op != "MsFlashKvCache":
            return
        for name, size in (("k_cache", spec.attention.head_dim), ("v_cache", spec.attention.v_head_dim)):
            if size % ROW:
                raise value_error(spec.func, f"the 'head_dim' of '{name}' must be a multiple of {ROW} for the backend "
                                             f"'{self.name}', which does not copy caches to pad them, but got {size}.")

    def hands_over(self, x):
        return isinstance(x, mindspore.Parameter)

    def available(self):
        device = mindspore.get_context("device_target")
        if device != "Ascend":
            return False, f"the device target is {device}, not Ascend"
        for folder in packages():
            if folder.is_dir() and not lacks(folder):
                return True, ""
        near = [folder for folder in packages() if VENDOR in folder.name and folder.is_dir()]
        if near:
            return False, f"the operator package {near[0]} lacks {', '.join(lacks(near[0]))}"
        return False, (f"no operator package '{VENDOR}' under {_PATH}. Hint: op_impl/ascendc/build.sh makes one, see "
                       "docs/ascend.md")

    def key(self, spec):
        return spec     # with its shapes: inference in Python has to state those of the results

    def form(self, spec):
        """What `call_on_ascend` has to know: the attribute, whether query, key and value are one tensor, how many
        zeros make a row of query and key, and of value, a multiple of 16, and how many rows lie side by side in the
        last axis of query, of key and value, and of the output."""
        inner = _padded(spec)
        joined = spec.layout in ("BSH", "SBH")
        q_heads, k_heads = spec.num_heads, spec.num_kv_heads
        return (inner.render(), spec.packed, inner.head_dim - spec.head_dim, inner.v_head_dim - spec.v_head_dim,
                (q_heads + 2 * k_heads if spec.packed else q_heads) if joined else 1, k_heads if joined else 1,
                q_heads if joined else 1)

    def kvcache_form(self, spec):
        """What `kvcache_on_ascend` has to know: the attribute, of a call whose `query` and `k` are rotated, the axis of
        the rows, how many are new, and which channels a rotary embedding pairs."""
        inputs = tuple(None if name.startswith("rotary") else arg for name, arg in zip(KVCACHE_SLOTS, spec.inputs))
        rotated = dataclasses.replace(spec, inputs=inputs, interleaved=False)
        return rotated.render(), spec.layout.index("S"), spec.new_len, spec.interleaved

    def attribute(self, spec):
        return spec.render()

    def primitive(self, op, spec, bprop):
        results = _RESULTS[op](spec) if op in _RESULTS else _results(op, _padded(spec))
        shapes, dtypes = tuple(s for s, _ in results), tuple(getattr(mindspore, d) for _, d in results)
        if len(results) == 1:
            shapes, dtypes = shapes[0], dtypes[0]
        writes = op == "MsFlashKvCache" and spec.appends
        custom = self.custom(op, _Writing if writes else _InGraph, lambda *_: shapes, lambda *_: dtypes, bprop)
        return custom.add_prim_attr("side_effect_mem", True) if writes else custom

    def custom(self, op, kind, out_shape, out_dtype, bprop):
        """The primitive of the aclnn function, a `kind`."""
        return kind(api_name(op), out_shape, out_dtype, "aot", bprop, registration(op))

    def _gradient(self, op, spec):
        if op == "MsFlashMerge":
            return no_merge_gradient
        if op == "MsFlashKvCache":
            return no_kvcache_gradient
        if op != "MsFlashFwd":
            return no_second_order
        return make_bprop(self.backward(spec), self.bias_grad(spec) if spec.has("bias") else None,
                          _padded(spec).render(), spec.packed, spec.has("sinks"))


def _up(size):
    return -(-size // ROW) * ROW


def _padded(spec):
    """The request that the kernels get: head dims that are multiples of 16, the scale that of the true one."""
    if spec.head_dim % ROW == 0 and spec.v_head_dim % ROW == 0:
        return spec
    head_dim, v_head_dim = _up(spec.head_dim), _up(spec.v_head_dim)
    inputs = list(spec.inputs)
    for slot, was, size in ((0, spec.head_dim, head_dim), (1, spec.head_dim, head_dim),
                            (2, spec.v_head_dim, v_head_dim)):
        if inputs[slot] is not None:
            shape = inputs[slot].shape
            inputs[slot] = Arg(shape[:-1] + (shape[-1] // was * size,), inputs[slot].dtype)
    scale = spec.head_dim ** -0.5 if spec.scale is None else spec.scale
    return dataclasses.replace(spec, head_dim=head_dim, v_head_dim=v_head_dim, scale=scale, inputs=tuple(inputs))


def _results(op, spec):
    """Shapes and dtypes of the results of `op`."""
    if op == "MsFlashFwd":
        return [(spec.out_shape, spec.dtype)] + [(spec.lse_shape, "float32")] * 3
    given = dict(zip(op_table.input_names(), spec.inputs))
    if op == "MsFlashBiasGrad":
        return [tuple(given["bias"])]
    missing = Arg((1,), spec.dtype)
    return [tuple(given[name] or missing) for name in ("query", "key", "value")] + [
        tuple(given["sinks"] or Arg((1,), "float32"))]


def _merged(spec):
    """The same of the merge."""
    outs, lses = spec.inputs
    return [(outs.shape[1:], spec.dtype), (lses.shape[1:], "float32")]


def _cached(spec):
    """The same of attention over caches."""
    return [(spec.attention.out_shape, spec.dtype), (spec.attention.lse_shape, "float32")]


_RESULTS = {"MsFlashMerge": _merged, "MsFlashKvCache": _cached}


def make_bprop(backward, bias_grad, attribute, packed, has_sinks):
    """As in base.py, for ops that take their attribute as the last argument."""

    def bprop(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k, spec, out, dout):
        dq, dk, dv, dsinks = backward(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q,
                                      cu_k, out[0], out[2], out[3], dout[0], dout[1], attribute)
        if packed:
            dk, dv = no_gradient(key), no_gradient(value)
        if bias_grad is None:
            dbias = no_gradient(bias)
        else:
            dbias = bias_grad(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k,
                              out[0], out[2], out[3], dout[0], dout[1], attribute)
        if not has_sinks:
            dsinks = no_gradient(sinks)
        return (dq, dk, dv, no_gradient(attn_mask), dbias, no_gradient(alibi_slopes), dsinks, no_gradient(seed),
                no_gradient(drop_mask), no_gradient(cu_q), no_gradient(cu_k), None)

    return bprop


def no_second_order(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k, attn, row_max,
                    row_sum, dout, dlse, spec, grads, dgrads):
    """Stands where the gradient of the gradient would be."""
    raise RuntimeError("For 'flash_attention', second order and forward-mode gradients are not supported.")


def no_merge_gradient(outs, lses, spec, merged, dmerged):
    """The same for the merge."""
    raise RuntimeError("For 'merge_attention', gradients are not supported.")


def no_kvcache_gradient(query, k_cache, v_cache, k, v, cache_seqlens, block_table, rotary_cos, rotary_sin, alibi_slopes,
                        sinks, spec, outs, douts):
    """The same for attention over caches."""
    raise RuntimeError("For 'flash_attention_with_kvcache', gradients are not supported. Hint: train with "
                       "flash_attention.")
