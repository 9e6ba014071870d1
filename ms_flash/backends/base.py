"""What a backend is, and the gradient that all of them share."""

from __future__ import annotations

import abc
import functools
import threading

from mindspore import ops

from .. import op_table
from ..kvcache_spec import KvCacheSpec, MergeSpec
from ..mha_spec import MhaSpec
from ..spec import AttentionSpec, type_error, value_error

_building, _launching = threading.Lock(), threading.Lock()


class Custom(ops.Custom):
    """MindSpore's primitive for one caller at a time: it mixes up the tensors of Custom ops that several Python threads
    launch at once in PyNative, native and Python ones (seen in 2.10; a graph does not come here)."""

    def __call__(self, *args):
        with _launching:
            return super().__call__(*args)


class Backend(abc.ABC):
    """One place where attention runs. The three primitives take the inputs of ops.yaml in slot order.

    Attributes:
        name (str): What users pass as `backend`.
        takes_none (bool): Whether an absent input may be ``None``; otherwise a placeholder Tensor stands for it.
        dynamic_shape (bool): Whether a graph may be compiled before the shapes are known.
        writes_inputs (bool): Whether an op can write into its inputs; otherwise it returns what they have to be.
        takes_empty (bool): Whether an op over a cache takes Tensors without elements.
        copied (str): Of what it gets a copy in PyNative, so that a cache may not be one: see `hands_over`.
    """

    name: str
    takes_none = True
    dynamic_shape = True
    writes_inputs = True
    takes_empty = True
    copied = "a view of another Tensor"

    @abc.abstractmethod
    def available(self) -> tuple[bool, str]:
        """Whether it can run here, and if not, why."""

    @abc.abstractmethod
    def key(self, spec: AttentionSpec):
        """The part of `spec` that its primitives depend on: equal keys share them."""

    @abc.abstractmethod
    def primitive(self, op: str, spec: AttentionSpec, bprop):
        """A new MindSpore primitive for `op` of ops.yaml, differentiated by `bprop`."""

    def check(self, op: str, spec) -> None:
        """Refuses what this backend cannot do, by its entry in ops.yaml, before anything runs.

        Raises:
            TypeError: If it does not take the dtype.
            ValueError: If it has no such op, or not for this layout, head_dim or precision.
        """
        entry = op_table.table()["backends"][self.name]
        if op not in entry["ops"]:
            what = op_table.table()["ops"][op]["summary"]
            raise value_error(spec.func, f"the backend '{self.name}' has no '{op}' ({what}).")
        if spec.dtype not in entry["dtypes"]:
            raise type_error(spec.func, f"the dtype of 'query' must be one of {', '.join(entry['dtypes'])} for the "
                                        f"backend '{self.name}', but got {spec.dtype}. Hint: cast query, key and "
                                        "value, or use another backend.")
        spec = getattr(spec, "attention", spec)     # of the block op, that inside
        if spec.layout not in entry["layouts"]:
            raise value_error(spec.func, f"'layout' must be one of {', '.join(map(repr, entry['layouts']))} for the "
                                         f"backend '{self.name}', but got {spec.layout!r}.")
        if "head_dim" in entry:
            for tensor, size in spec.head_dims:
                if size > entry["head_dim"]:
                    raise value_error(spec.func, f"the 'head_dim' of '{tensor}' must be at most {entry['head_dim']} "
                                                 f"for the backend '{self.name}', but got {size}.")
        if "precision" in entry and spec.precision not in entry["precision"]:
            raise value_error(spec.func, f"'precision_mode' must be {entry['precision'][0]!r} for the backend "
                                         f"'{self.name}', but got {spec.precision!r}.")

    def form(self, spec: AttentionSpec):
        """Constants that a call needs beside the inputs; ``None``: the inputs are all that the primitive takes."""
        return None

    def kvcache_form(self, spec: KvCacheSpec):
        """As `form`, for attention over a cache."""
        return None

    def attribute(self, spec: MergeSpec):
        """The attribute as the last argument of the merge; ``None``: the primitive has it already."""
        return None

    def forward(self, spec: AttentionSpec):
        """Primitive: inputs -> (out, lse, row_max, row_sum), with its gradient."""
        return self._cached("MsFlashFwd", spec)

    def backward(self, spec: AttentionSpec):
        """Primitive: inputs, out, row_max, row_sum, dout, dlse -> (dq, dk, dv, dsinks)."""
        return self._cached("MsFlashBwd", spec)

    def bias_grad(self, spec: AttentionSpec):
        """Primitive: the inputs of `backward` -> dbias."""
        return self._cached("MsFlashBiasGrad", spec)

    def mha_forward(self, spec: MhaSpec):
        """Primitive: mha_inputs -> (y, q, k, v, attn, row_max, row_sum), with its gradient."""
        return self._cached("MsFlashMhaFwd", spec)

    def mha_backward(self, spec: MhaSpec):
        """Primitive: mha_inputs, the results of `mha_forward` that `spec.saved` names, dy -> gradients of GRADIENTS."""
        return self._cached("MsFlashMhaBwd", spec)

    def mha_bias_grad(self, spec: MhaSpec):
        """Primitive: the inputs of `mha_backward` -> dbias."""
        return self._cached("MsFlashMhaBiasGrad", spec)

    def kvcache(self, spec: KvCacheSpec):
        """Primitive: kvcache_inputs -> (out, lse), and the two caches unless `writes_inputs`."""
        return self._cached("MsFlashKvCache", spec)

    def merge(self, spec: MergeSpec):
        """Primitive: outs, lses -> (out, lse)."""
        return self._cached("MsFlashMerge", spec)

    def hands_over(self, x) -> bool:
        """Whether in PyNative an op gets the memory of the Tensor `x` itself: what it writes there is in `x`."""
        return True

    def _cached(self, op, spec):
        found = spec.primitives.get((self.name, op))
        if found is None:
            self.check(op, spec)
            found = spec.primitives[self.name, op] = self._shared(op, spec)
        return found

    def _shared(self, op, spec):
        found = self._primitives.get((op, self.key(spec)))
        if found is not None:
            return found
        bprop = self._gradient(op, spec)
        with _building:     # one Custom per set of attributes, even when several threads ask for it
            found = self._primitives.get((op, self.key(spec)))
            if found is None:
                found = self._primitives[op, self.key(spec)] = self.primitive(op, spec, bprop)
            return found

    def _gradient(self, op, spec):
        if op == "MsFlashFwd":
            return make_bprop(self.backward(spec), self.bias_grad(spec) if spec.has("bias") else None, spec.packed,
                              spec.has("sinks"))
        if op == "MsFlashMhaFwd":
            return make_mha_bprop(self.mha_backward(spec), self.mha_bias_grad(spec) if spec.has("bias") else None,
                                  spec.saved)
        if op == "MsFlashKvCache":
            return no_kvcache_gradient
        if op == "MsFlashMerge":
            return no_merge_gradient
        return no_second_order if op in ("MsFlashBwd", "MsFlashBiasGrad") else no_mha_second_order

    @functools.cached_property
    def _primitives(self):
        return {}


def no_gradient(x):
    """Gradient of an input that is not differentiable."""
    if x is None:
        return None
    return ops.zeros_like(x)


def make_bprop(backward, bias_grad, packed, has_sinks):
    """The gradient of the forward op. MindSpore needs a function with one named parameter per input."""

    def bprop(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k, out, dout):
        dq, dk, dv, dsinks = backward(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q,
                                      cu_k, out[0], out[2], out[3], dout[0], dout[1])
        if packed:
            dk, dv = no_gradient(key), no_gradient(value)
        if bias_grad is None:
            dbias = no_gradient(bias)
        else:  # an op of its own, so that a graph drops it where nobody asks for the gradient of bias
            dbias = bias_grad(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k,
                              out[0], out[2], out[3], dout[0], dout[1])
            if isinstance(dbias, tuple):
                dbias = dbias[0]
        if not has_sinks:
            dsinks = no_gradient(sinks)
        return (dq, dk, dv, no_gradient(attn_mask), dbias, no_gradient(alibi_slopes), dsinks, no_gradient(seed),
                no_gradient(drop_mask), no_gradient(cu_q), no_gradient(cu_k))

    return bprop


def no_second_order(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k, out, row_max,
                    row_sum, dout, dlse, grads, dgrads):
    """Stands where the gradient of the gradient would be: an error instead of silent zeros."""
    raise RuntimeError("For 'flash_attention', second order and forward-mode gradients are not supported. Hint: where "
                       "ms_flash.fuse() put it, ms_flash.unfuse() leaves the attention as written.")


def gradient_if(x, grad):
    """`grad` where there is an input, nothing where there is none."""
    if x is None:
        return None
    return grad


def make_mha_bprop(backward, bias_grad, saved):
    """The same for the block op."""

    def bprop(x, context, context_v, w_q, w_k, w_v, b_q, b_k, b_v, w_o, b_o, attn_mask, bias, alibi_slopes, sinks, seed,
              drop_mask, out, dout):
        q, k, v, attn = out[saved[0]], out[saved[1]], out[saved[2]], out[saved[3]]
        g = backward(x, context, context_v, w_q, w_k, w_v, b_q, b_k, b_v, w_o, b_o, attn_mask, bias, alibi_slopes,
                     sinks, seed, drop_mask, q, k, v, attn, out[5], out[6], dout[0])
        if bias_grad is None:
            dbias = no_gradient(bias)
        else:
            dbias = bias_grad(x, context, context_v, w_q, w_k, w_v, b_q, b_k, b_v, w_o, b_o, attn_mask, bias,
                              alibi_slopes, sinks, seed, drop_mask, q, k, v, attn, out[5], out[6],
                              dout[0])
            if isinstance(dbias, tuple):
                dbias = dbias[0]
        return (g[0], gradient_if(context, g[1]), gradient_if(context_v, g[2]), g[3], gradient_if(w_k, g[4]),
                gradient_if(w_v, g[5]), gradient_if(b_q, g[6]), gradient_if(b_k, g[7]), gradient_if(b_v, g[8]),
                gradient_if(w_o, g[9]), gradient_if(b_o, g[10]), no_gradient(attn_mask), dbias,
                no_gradient(alibi_slopes), gradient_if(sinks, g[11]), no_gradient(seed), no_gradient(drop_mask))

    return bprop


def no_mha_second_order(x, context, context_v, w_q, w_k, w_v, b_q, b_k, b_v, w_o, b_o, attn_mask, bias, alibi_slopes,
                        sinks, seed, drop_mask, q, k, v, attn, row_max, row_sum, dy, grads, dgrads):
    """As `no_second_order`, for the block op."""
    raise RuntimeError("For 'flash_attention', second order and forward-mode gradients are not supported. Hint: where "
                       "ms_flash.fuse() put it, ms_flash.unfuse() leaves the attention as written.")


def no_kvcache_gradient(query, k_cache, v_cache, k, v, cache_seqlens, block_table, rotary_cos, rotary_sin, alibi_slopes,
                        sinks, outs, douts):
    """Stands where a gradient would be: an error instead of silent zeros."""
    raise RuntimeError("For 'flash_attention_with_kvcache', gradients are not supported. Hint: train with "
                       "flash_attention.")


def no_merge_gradient(outs, lses, merged, dmerged):
    """The same for the merge."""
    raise RuntimeError("For 'merge_attention', gradients are not supported.")
