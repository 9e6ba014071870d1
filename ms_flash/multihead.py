"""MultiheadAttention: mindspore.nn.MultiheadAttention over ms_flash, without an attention matrix in memory."""

from __future__ import annotations

import math
import numbers

import mindspore
from mindspore import nn, ops
from mindspore.common import dtype as mstype
from mindspore.rewrite.common import namespace

from .compile_time import CompileTime
from .functional import flash_attention
from .spec import Arg, type_error, type_name, value_error

_NAME = "MultiheadAttention"
_FLOATS = ("float32", "float16", "bfloat16")
_FLOAT32, _BFLOAT16 = mstype.float32, mstype.bfloat16


class MultiheadAttention(nn.MultiheadAttention):
    r"""
    Multi-head attention, a drop-in for :class:`mindspore.nn.MultiheadAttention` that runs on :func:`flash_attention`.

    .. math::
        MultiHeadAttention(query, key, value) = Concat(head_1, \dots, head_h)W^O, \quad
        head_i = Attention(query W_i^Q, key W_i^K, value W_i^V)

    Constructor, parameter names, initialisation, inputs and outputs are those of MindSpore's class (this one derives
    from it), so a checkpoint of one loads into the other. Memory of the attention itself is linear in the lengths as
    long as the weights are not asked for: pass ``need_weights=False`` where they are not used. With
    ``need_weights=True``, the default, they are computed as well, in float32, from the log-sum-exp of each row:
    that takes :math:`(N, num\_heads, L, S)` floats, as it does in MindSpore. While training with dropout they are the
    weights after dropout, the very ones that made the output, and take about `S / head_dim` times longer.

    Where results differ from MindSpore's:

    - A query whose keys are all masked out attends to nothing: its attention is 0 (so its output is the bias of the
      output projection) and so are its weights and gradients. MindSpore gives NaN.
    - NaN or Inf in a key that is masked out for all queries does not reach the outputs.
    - A bool and a float mask given together do what each does alone: True masks out, a float is added. MindSpore adds
      True as 1 to the scores, or masks out wherever the float is not 0.
    - The dropout mask comes from another generator (see :func:`flash_attention`). `dropout` outside [0, 1) is an error.
    - float64 is not supported. A float16 mask is converted to float32 when the input is not float16.
    - Keyword arguments work for `query`, `key` and `value` too.

    Args:
        embed_dim (int): Total width. Each head has ``embed_dim // num_heads``.
        num_heads (int): Number of heads; divides `embed_dim`.
        dropout (float, optional): Probability of dropping an attention weight while training, in [0, 1).
            Default: ``0.0``.
        has_bias (bool, optional): Whether the input and output projections have a bias. Default: ``True``.
        add_bias_kv (bool, optional): Whether to append one learned key and value. Default: ``False``.
        add_zero_attn (bool, optional): Whether to append one key and value of zeros. Default: ``False``.
        kdim (int, optional): Width of `key`. Default: ``None`` (`embed_dim`).
        vdim (int, optional): Width of `value`. Default: ``None`` (`embed_dim`).
        batch_first (bool, optional): ``True`` for (batch, length, width), ``False`` for (length, batch, width).
            Default: ``False``.
        dtype (:class:`mindspore.dtype`, optional): Dtype of the parameters: float32, float16 or bfloat16.
            Default: ``mstype.float32``. MindSpore's CPU matrix product has no bfloat16: there the projections of
            bfloat16 inputs are computed in float32 and rounded.

    Keyword Args:
        causal (bool, optional): Masks out every key after the query's own position without an (L, S) mask; the
            last query sees all keys. Not together with `add_bias_kv` or `add_zero_attn`. Default: ``False``.
        backend (str, optional): Backend of :func:`flash_attention`. Default: ``None``, chosen by device.

    Inputs:
        - **query** (Tensor) - :math:`(L, N, E)`, or :math:`(N, L, E)` with `batch_first`, or unbatched
          :math:`(L, E)`; N is the batch size, L the query length, E `embed_dim`.
        - **key** (Tensor) - :math:`(S, N, kdim)`, :math:`(N, S, kdim)` or :math:`(S, kdim)`. Dtype of `query`.
        - **value** (Tensor) - :math:`(S, N, vdim)`, :math:`(N, S, vdim)` or :math:`(S, vdim)`. Dtype of `query`.
        - **key_padding_mask** (Tensor, optional) - :math:`(N, S)`, unbatched :math:`(S)`. bool: ``True`` keys are
          ignored. Float: added to the scores. Default: ``None``.
        - **need_weights** (bool, optional) - Whether to return the attention weights too. Default: ``True``.
        - **attn_mask** (Tensor, optional) - :math:`(L, S)`, or :math:`(N \cdot num\_heads, L, S)`. bool or uint8:
          ``True`` positions are masked out. Float: added to the scores, differentiable. Default: ``None``.
        - **average_attn_weights** (bool, optional) - Whether the weights are averaged over the heads.
          Default: ``True``.

    Outputs:
        Tuple (attn_output, attn_output_weights), or (attn_output,) with ``need_weights=False``.

        - **attn_output** (Tensor) - Shape of `query`.
        - **attn_output_weights** (Tensor) - :math:`(N, L, S')`, or :math:`(N, num\_heads, L, S')` without averaging,
          unbatched without N, dtype of `query`; S' is S and the appended keys.

    Raises:
        ValueError: If `embed_dim` is not divisible by `num_heads`, `dropout` is not in [0, 1), `causal` is combined
            with appended keys, or a shape does not fit.
        TypeError: If an argument has the wrong type, or a Tensor the wrong dtype.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> import ms_flash
        >>> x = ms.Tensor(np.random.randn(8, 10, 128), ms.float32)
        >>> attention = ms_flash.nn.MultiheadAttention(128, 8, batch_first=True)
        >>> output, weights = attention(x, x, x)
        >>> print(output.shape, weights.shape)
        (8, 10, 128) (8, 10, 10)
        >>> (output,) = attention(x, x, x, need_weights=False)
        >>> print(output.shape)
        (8, 10, 128)
    """

    def __init__(self, embed_dim, num_heads, dropout=0.0, has_bias=True, add_bias_kv=False, add_zero_attn=False,
                 kdim=None, vdim=None, batch_first=False, dtype=mstype.float32, *, causal=False, backend=None):
        _check_arguments(embed_dim, num_heads, dropout, has_bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
                         dtype, causal)
        super().__init__(embed_dim, num_heads, dropout, has_bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
                         dtype)
        self.causal = causal
        self.backend = backend
        self._appended = int(add_bias_kv) + int(add_zero_attn)
        self._widths = (embed_dim, self.kdim, self.vdim)
        self._matmul = ops.MatMul(transpose_b=True)

    def __call__(self, *args, **kwargs):
        # Not the parent's: that one notes which inputs are one object, and such a note outlives its call in a graph.
        return nn.Cell.__call__(self, *args, **kwargs)

    def construct(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
                  average_attn_weights=True):
        batched, widen, mask_kind, padding_kind, joined = _check_inputs(
            query, key, value, key_padding_mask, attn_mask, need_weights, average_attn_weights, self._widths,
            self.num_heads, self.batch_first)
        if widen:
            query, key, value = query.astype(_FLOAT32), key.astype(_FLOAT32), value.astype(_FLOAT32)
        if not batched:
            query, key, value = query.expand_dims(0), key.expand_dims(0), value.expand_dims(0)
        batch_axis = 0 if self.batch_first or not batched else 1
        q, k, v = self._project(query, key, value, widen)
        if self._appended > 0:
            k = self._append(k, self.bias_k, batch_axis)
            v = self._append(v, self.bias_v, batch_axis)
        mask, bias = self._masks(attn_mask, key_padding_mask, mask_kind, padding_kind, joined, q.shape[batch_axis],
                                 q.dtype)
        if widen:
            q, k, v = q.astype(_BFLOAT16), k.astype(_BFLOAT16), v.astype(_BFLOAT16)

        if not need_weights:
            out = self._attend(q, k, v, mask, bias, batch_axis, False)
            weights = None
        elif self.training and self.dropout > 0:
            out, weights = self._attend_and_weights_after_dropout(q, k, v, mask, bias, batch_axis)
        else:
            out, lse = self._attend(q, k, v, mask, bias, batch_axis, True)
            weights = self._weights(q, k, mask, bias, lse, batch_axis)

        if widen:
            out = out.astype(_FLOAT32)
        out = self._linear(out, self.out_proj.weight, self.out_proj.bias if self.out_proj.has_bias else None, widen)
        if not batched:
            out = out.squeeze(0)
        if widen:
            out = out.astype(_BFLOAT16)
        if not need_weights:
            return (out,)
        if average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            weights = weights.squeeze(0)
        return out, weights.astype(out.dtype)

    def _project(self, query, key, value, widen):
        """Query, key and value of all heads, side by side in the last axis."""
        if self._qkv_same_embed_dim:
            w_q, w_k, w_v = ops.split(self.in_proj_weight, self.embed_dim)
        else:
            w_q, w_k, w_v = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        if self.in_proj_bias is None:
            b_q, b_k, b_v = None, None, None
        else:
            b_q, b_k, b_v = ops.split(self.in_proj_bias, self.embed_dim)
        return (self._linear(query, w_q, b_q, widen), self._linear(key, w_k, b_k, widen),
                self._linear(value, w_v, b_v, widen))

    def _linear(self, x, weight, bias, widen):
        y = self._matmul(x.reshape((-1, x.shape[-1])), weight.astype(_FLOAT32) if widen else weight)
        if bias is not None:
            y = y + (bias.astype(_FLOAT32) if widen else bias)
        return y.reshape(x.shape[:-1] + (y.shape[-1],))

    def _append(self, x, learned, batch_axis):
        """Appends the learned key (or value) and the one of zeros along the length axis."""
        batch = x.shape[batch_axis]
        shape = (batch, 1, self.embed_dim) if batch_axis == 0 else (1, batch, self.embed_dim)
        parts = (x,)
        if learned is not None:
            repeats = (batch, 1, 1) if batch_axis == 0 else (1, batch, 1)
            parts = parts + (ops.tile(learned.astype(x.dtype), repeats),)
        if self.add_zero_attn:
            parts = parts + (ops.zeros(shape, x.dtype),)
        return ops.cat(parts, 1 - batch_axis)

    def _masks(self, attn_mask, key_padding_mask, mask_kind, padding_kind, joined, batch, dtype):
        """What flash_attention calls attn_mask and bias; no larger than what the user gave."""
        if mask_kind != "":
            attn_mask = self._working_dtype(attn_mask, mask_kind, dtype)
            if attn_mask.ndim == 2:
                attn_mask = attn_mask.expand_dims(0).expand_dims(0)
            else:
                attn_mask = attn_mask.reshape((batch, self.num_heads) + attn_mask.shape[1:])
            attn_mask = self._allow_appended(attn_mask)
        if padding_kind != "":
            key_padding_mask = self._working_dtype(key_padding_mask, padding_kind, dtype)
            key_padding_mask = key_padding_mask.reshape((batch, 1, 1, key_padding_mask.shape[-1]))
            key_padding_mask = self._allow_appended(key_padding_mask)

        mask, bias = None, None
        if mask_kind == "bool" and padding_kind == "bool":
            if joined:
                mask = ops.logical_or(attn_mask, key_padding_mask)
            else:
                # an (L, S) mask shared by the batch would become (N, 1, L, S): the padding goes in as 0 and -inf
                mask, bias = attn_mask, ops.zeros_like(key_padding_mask, dtype=_FLOAT32)
                bias = bias.masked_fill(key_padding_mask, -math.inf)
        elif mask_kind == "float" and padding_kind == "float":
            bias = attn_mask + key_padding_mask
        else:
            if mask_kind == "bool":
                mask = attn_mask
            elif mask_kind == "float":
                bias = attn_mask
            if padding_kind == "bool":
                mask = key_padding_mask
            elif padding_kind == "float":
                bias = key_padding_mask
        return mask, bias

    def _working_dtype(self, mask, kind, dtype):
        if kind == "bool":
            return mask.astype(mstype.bool_)
        return mask.astype(dtype if mask.dtype == dtype else _FLOAT32)

    def _allow_appended(self, mask):
        """The mask with columns for the appended keys, which are never masked out."""
        if self._appended == 0:
            return mask
        return ops.cat((mask, ops.zeros(mask.shape[:-1] + (self._appended,), mask.dtype)), -1)

    def _attend(self, q, k, v, mask, bias, batch_axis, return_lse):
        return flash_attention(q, k, v, mask, bias=bias, dropout_p=self.dropout, causal=self.causal,
                               layout="BSH" if batch_axis == 0 else "SBH", num_heads=self.num_heads,
                               training=self.training, return_lse=return_lse, backend=self.backend)

    def _weights(self, q, k, mask, bias, lse, batch_axis):
        """softmax of the scores, float32 (N, num_heads, L, S), from the log-sum-exp of each row."""
        q = self._heads_first(q.astype(_FLOAT32), batch_axis) * (self.head_dim ** -0.5)
        k = self._heads_first(k.astype(_FLOAT32), batch_axis)
        scores = ops.matmul(q, k.swapaxes(-1, -2))
        if bias is not None:
            scores = (scores + bias.astype(_FLOAT32)).masked_fill(bias == -math.inf, -math.inf)    # NaN - inf is NaN
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        if self.causal:
            q_len, k_len = scores.shape[-2], scores.shape[-1]
            after = ops.arange(k_len).expand_dims(0) > ops.arange(q_len).expand_dims(1) + (k_len - q_len)
            scores = scores.masked_fill(after, -math.inf)
        lse = lse.masked_fill(lse == -math.inf, 0.0).expand_dims(-1)     # a row without keys: exp(-inf - 0) = 0
        return ops.exp(scores - lse)

    def _attend_and_weights_after_dropout(self, q, k, v, mask, bias, batch_axis):
        """With the unit matrix beside the values, the output holds the dropped-out weights beside itself."""
        length, dtype = v.shape[1 - batch_axis], v.dtype
        unit = ops.eye(length, length, _FLOAT32)
        unit = unit.reshape((1, length, 1, length) if batch_axis == 0 else (length, 1, 1, length))
        v = v.astype(_FLOAT32).reshape(v.shape[:2] + (self.num_heads, self.head_dim))
        v = ops.cat((v, ops.broadcast_to(unit, v.shape[:3] + (length,))), -1)
        v = v.reshape(v.shape[:2] + (-1,)).astype(dtype)
        both = self._attend(q, k, v, mask, bias, batch_axis, False).astype(_FLOAT32)
        both = both.reshape(both.shape[:2] + (self.num_heads, self.head_dim + length))
        out = both[..., :self.head_dim].reshape(both.shape[:2] + (self.embed_dim,)).astype(dtype)
        weights = both[..., self.head_dim:]
        return out, weights.transpose((0, 2, 1, 3) if batch_axis == 0 else (1, 2, 0, 3))

    def _heads_first(self, x, batch_axis):
        x = x.reshape(x.shape[:2] + (self.num_heads, self.head_dim))
        return x.transpose((0, 2, 1, 3) if batch_axis == 0 else (1, 2, 0, 3))


def _check_arguments(embed_dim, num_heads, dropout, has_bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
                     dtype, causal):
    for name, x in (("embed_dim", embed_dim), ("num_heads", num_heads), ("kdim", kdim), ("vdim", vdim)):
        if x is None and name in ("kdim", "vdim"):
            continue
        if isinstance(x, bool) or not isinstance(x, numbers.Integral):
            raise type_error(_NAME, f"the type of '{name}' must be int, but got {type(x).__name__}.")
        if x < 1:
            raise value_error(_NAME, f"'{name}' must be 1 or greater, but got {x}.")
    if embed_dim % num_heads:
        raise value_error(_NAME, f"'embed_dim' must be divisible by 'num_heads' {num_heads}, but got {embed_dim}.")
    for name, x in (("has_bias", has_bias), ("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn),
                    ("batch_first", batch_first), ("causal", causal)):
        if not isinstance(x, bool):
            raise type_error(_NAME, f"the type of '{name}' must be bool, but got {type(x).__name__}.")
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real):
        raise type_error(_NAME, f"the type of 'dropout' must be float, but got {type(dropout).__name__}.")
    if not 0 <= dropout < 1:
        raise value_error(_NAME, f"'dropout' must be in the range [0, 1), but got {dropout}.")
    if dtype is not None and dtype not in (mstype.float32, mstype.float16, mstype.bfloat16):
        raise type_error(_NAME, f"'dtype' must be one of float32, float16, bfloat16, but got {dtype}.")
    if causal and (add_bias_kv or add_zero_attn):
        appended = "add_bias_kv" if add_bias_kv else "add_zero_attn"
        raise value_error(_NAME, f"'causal' must be False with '{appended}', whose key has no position, but got True.")


def _check(query, key, value, padding, mask, need_weights, average, widths, num_heads, batch_first):
    """Checks one call.

    Returns:
        tuple (batched, widen, kind of attn_mask, kind of key_padding_mask, joined): `widen` asks for projections in
        float32; a kind is "bool", "float", or "" for no mask; `joined` says that two bool masks joined are no larger
        than attn_mask.
    """
    for name, flag in (("need_weights", need_weights), ("average_attn_weights", average)):
        if not isinstance(flag, bool):
            raise type_error(_NAME, f"the type of '{name}' must be bool, but got {type_name(flag)}.")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Arg):
            raise type_error(_NAME, f"the type of '{name}' must be Tensor, but got {type_name(x)}.")
        if x.shape is None:
            raise value_error(_NAME, f"the rank of '{name}' must be known while the graph is compiled.")
        if x.dtype not in _FLOATS:
            raise type_error(_NAME, f"the dtype of '{name}' must be one of {', '.join(_FLOATS)}, but got {x.dtype}.")
        if x.dtype != query.dtype:
            raise type_error(_NAME, f"the dtype of '{name}' must be equal to that of 'query' {query.dtype}, but got "
                                    f"{x.dtype}.")
    rank = len(query.shape)
    if rank not in (2, 3):
        raise value_error(_NAME, f"the rank of 'query' must be 3, or 2 without a batch, but got {rank}, shape {query}.")
    for name, x, width in (("query", query, widths[0]), ("key", key, widths[1]), ("value", value, widths[2])):
        if len(x.shape) != rank:
            raise value_error(_NAME, f"the rank of '{name}' must be equal to that of 'query' {rank}, but got "
                                     f"{len(x.shape)}, shape {x}.")
        if _differ(x.shape[-1], width):
            what = {"query": "embed_dim", "key": "kdim", "value": "vdim"}[name]
            raise value_error(_NAME, f"the last axis of '{name}' must be '{what}' {width}, but got {x.shape[-1]}, "
                                     f"shape {x}.")
    batched = rank == 3
    first = batch_first or not batched
    q_len, k_len, v_len = (x.shape[rank - 2 if first else 0] for x in (query, key, value))
    batch, k_batch, v_batch = (x.shape[0 if first else 1] if batched else 1 for x in (query, key, value))
    if _differ(k_len, v_len):
        raise value_error(_NAME, f"the length of 'value' must be equal to that of 'key' {k_len}, but got {v_len}.")
    for name, x in (("key", k_batch), ("value", v_batch)):
        if _differ(batch, x):
            hint = " Hint: 'batch_first' says whether the batch is the first axis."
            raise value_error(_NAME, f"the batch size of '{name}' must be equal to that of 'query' {batch}, but got "
                                     f"{x}.{hint}")
    allowed = [(q_len, k_len), (batch * num_heads if batch >= 0 else -1, q_len, k_len)]
    kind = _mask_kind("attn_mask", mask, ("bool", "uint8"), allowed, "(L, S) or (N * num_heads, L, S)")
    padding_shape, meaning = ((batch, k_len), "(N, S)") if batched else ((k_len,), "(S,)")
    padding_kind = _mask_kind("key_padding_mask", padding, ("bool",), [padding_shape], meaning)
    widen = query.dtype == "bfloat16" and mindspore.get_context("device_target") == "CPU"
    joined = kind == padding_kind == "bool" and (len(mask.shape) == 3 or batch == 1)
    return batched, widen, kind, padding_kind, joined


def _mask_kind(name, mask, bools, shapes, meaning):
    if mask is None:
        return ""
    if not isinstance(mask, Arg):
        raise type_error(_NAME, f"the type of '{name}' must be Tensor or None, but got {type_name(mask)}.")
    if mask.dtype not in bools + _FLOATS:
        hint = " Hint: a mask of 0 and 1 is a bool mask; cast it to bool, True = masked out."
        raise type_error(_NAME, f"the dtype of '{name}' must be one of {', '.join(bools + _FLOATS)}, but got "
                                f"{mask.dtype}.{hint if 'int' in mask.dtype else ''}")
    if mask.shape is None:
        raise value_error(_NAME, f"the rank of '{name}' must be known while the graph is compiled.")
    if not any(len(mask.shape) == len(s) and not any(map(_differ, mask.shape, s)) for s in shapes):
        expected = " or ".join(str(Arg(s, "")) for s in shapes)
        raise value_error(_NAME, f"the shape of '{name}' must be {meaning} = {expected}, but got {mask}.")
    return "bool" if mask.dtype in bools else "float"


def _differ(a, b):
    return a != b and a >= 0 and b >= 0


_check_inputs = CompileTime("MsFlashMultiheadCheck", _check)

# auto_mixed_precision at level O1 rewrites the source of every Cell that is not listed, and cannot rewrite this one.
namespace._subtree_black_list.append(MultiheadAttention)
