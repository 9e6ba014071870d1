"""The public functions: they parse the request, choose a backend and call its op."""

from __future__ import annotations

from mindspore import ops
from mindspore.common import dtype as mstype
from mindspore.common.generator import default_generator

from ms_flash.ascend_call import call_on_ascend
from ms_flash.resolve import GENERATOR_STEP, PLACEHOLDER, checked_flag, op_of, resolve


def _or_placeholder(x):
    """For ops that cannot take ``None``."""
    if x is None:
        return PLACEHOLDER
    return x


def _drawn_seed(shift):
    """The next (seed, offset) of MindSpore's default generator, shifted."""
    seed, offset = default_generator._step(GENERATOR_STEP)
    return ops.stack(((seed + shift[0]).reshape(()), (offset + shift[1]).reshape(())))


def _empty_result(query, sinks, cu_q, shapes):
    """Output and LSE when there is no key for any query: the sinks alone are in the softmax."""
    out = ops.zeros(shapes[0], query.dtype)
    if sinks is None:
        return out, ops.full(shapes[1], float("-inf"), dtype=mstype.float32)
    lse = ops.zeros(shapes[1], mstype.float32) + sinks.astype(mstype.float32).reshape((-1, 1))
    if cu_q is not None:    # rows after the last sequence belong to none
        rows = ops.arange(shapes[1][-1])
        lse = ops.where(rows < cu_q[-1], lse, ops.full_like(lse, float("-inf")))
    return out, lse


def attention(func, query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k, dropout_p,
              softmax_scale, causal, window_size, softcap, layout, causal_align, training, deterministic,
              precision_mode, block_m, block_n, backend, num_heads, num_kv_heads, mask_fill):
    """Output and LSE: what all public forms share. `func` names the public one in error texts.

    Beyond the public arguments: `drop_mask`, uint8, 1 = kept, replaces the drawn dropout mask; `mask_fill` is the
    finite score of positions that `attn_mask` masks out (``None``: -inf).
    """
    handle, seed_source, seed_shift, takes_none, shapes, form = resolve(
        func, backend, query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k,
        window_size, dropout_p, softmax_scale, causal, softcap, layout, causal_align, training, deterministic,
        precision_mode, block_m, block_n, num_heads, num_kv_heads, mask_fill)
    if shapes is not None:
        return _empty_result(query, sinks, cu_q, shapes)
    if isinstance(attn_mask, (tuple, list)):
        attn_mask = None
    if seed_source == "generator":
        seed = _drawn_seed(seed_shift)
    elif seed_source != "tensor":
        seed = None
    if not training:
        drop_mask = None
    if not takes_none:
        key, value, attn_mask, bias = (_or_placeholder(key), _or_placeholder(value), _or_placeholder(attn_mask),
                                       _or_placeholder(bias))
        alibi_slopes, sinks, seed, drop_mask = (_or_placeholder(alibi_slopes), _or_placeholder(sinks),
                                                _or_placeholder(seed), _or_placeholder(drop_mask))
        cu_q, cu_k = _or_placeholder(cu_q), _or_placeholder(cu_k)
    op = op_of(handle)
    if form is not None:
        return call_on_ascend(op, form, query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q,
                              cu_k)
    outs = op(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k)
    return outs[0], outs[1]


def flash_attention(query, key=None, value=None, attn_mask=None, *, dropout_p=0.0, softmax_scale=None, causal=False,
                    window_size=(-1, -1), bias=None, alibi_slopes=None, softcap=0.0, sinks=None, layout="BNSD",
                    causal_align="bottom_right", seed=None, training=True, return_lse=False, deterministic=True,
                    precision_mode="default", block_m=None, block_n=None, backend=None, num_heads=None,
                    num_kv_heads=None):
    r"""
    Exact attention whose memory is linear in the lengths: no matrix of scores is stored, forward or backward.

    .. math::
        s_{ij} = softcap \cdot \tanh(scale \cdot q_i \cdot k_j / softcap) + bias_{ij} - slope \cdot |i + o - j|, \quad
        out_i = \sum_j Dropout(softmax_j(s_{ij})) \cdot v_j

    over the keys j that neither `attn_mask`, the window nor `causal` masks out; without `softcap` its line is
    :math:`scale \cdot q_i \cdot k_j`. The diagonal of query i is key :math:`i + o`, where o is Sk - Sq for the
    alignment ``"bottom_right"`` and 0 for ``"top_left"``. A query without any key gets output 0, LSE -inf and
    gradients 0; what is stored in masked-out keys and values, NaN included, has no effect. Gradients flow to `query`,
    `key`, `value`, `bias` and `sinks`, through the output and through the LSE. Second order gradients are an error.

    B is the batch size, Sq and Sk the lengths of query and key, N the heads of the query, Nk those of key and value, D
    the head_dim, Dv that of the value. Grouped-query attention: N is a multiple of Nk, and query head n uses key head
    n // (N / Nk).

    Args:
        query (Tensor): Shape by `layout`: BNSD (B, N, Sq, D), BSND (B, Sq, N, D), BSH (B, Sq, N * D), SBH
            (Sq, B, N * D). Dtype float32, float16 or bfloat16. With `key` and `value` ``None`` it is packed QKV, all
            three along the head axis: BNSD (B, N + 2 * Nk, S, D) and so on, or BSND (B, S, 3, N, D).
        key (Tensor, optional): As `query`, with Sk and Nk. Dtype of `query`. Default: ``None``.
        value (Tensor, optional): As `key`, with Dv. Dtype of `query`. Default: ``None``.
        attn_mask (Union[Tensor, tuple[int]], optional): bool or uint8, True = masked out, of at most 4 axes,
            right-aligned with (B, N, Sq, Sk), every axis 1 or full, whatever the `layout`. Or a tuple (left, right),
            the same as `window_size`. Default: ``None``.

    Keyword Args:
        dropout_p (float, optional): Probability of dropping an attention weight, in [0, 1). Kept weights are divided by
            1 - `dropout_p`. Default: ``0.0``.
        softmax_scale (float, optional): Factor of query . key. Any finite number, 0 and negative ones included.
            Default: ``None``, which is head_dim ** -0.5.
        causal (bool, optional): Masks out every key behind the diagonal: a right window of 0. Default: ``False``.
        window_size (tuple[int], optional): (left, right), the numbers of keys that a query sees before and after its
            diagonal, both inclusive; -1 is no limit. Default: ``(-1, -1)``.
        bias (Tensor, optional): Added to the scores after scale and softcap. Dtype of `query` or float32; shape as
            `attn_mask`. -inf masks out; a finite number, however low, does not. Default: ``None``.
        alibi_slopes (Tensor, optional): float32, (N,) or (B, N). Not differentiable. Default: ``None``.
        softcap (float, optional): Bound of the scaled scores; 0 is none. Default: ``0.0``.
        sinks (Tensor, optional): (N,), dtype of `query` or float32: one logit per head that takes part in the softmax
            without a value. Default: ``None``.
        layout (str, optional): ``"BNSD"``, ``"BSND"``, ``"BSH"`` or ``"SBH"``. Default: ``"BNSD"``.
        causal_align (str, optional): Where the diagonal ends when Sq and Sk differ: ``"bottom_right"`` or
            ``"top_left"``. Default: ``"bottom_right"``.
        seed (Union[int, Tensor], optional): Of dropout: an int, or an int64 Tensor (2,) with seed and offset, which a
            compiled step can vary. ``None`` draws both from MindSpore's default generator, anew at every call and
            repeatable after ``mindspore.set_seed`` (which a graph heeds when it is compiled); under ``vmap`` a seed has
            to be given. Default: ``None``.
        training (bool, optional): ``False`` switches dropout off. Default: ``True``.
        return_lse (bool, optional): Whether to return the LSE as well. Default: ``False``.
        deterministic (bool, optional): Results are the same bit by bit from run to run and for any number of threads;
            ``False`` permits another order of sums, of which no backend makes use. Default: ``True``.
        precision_mode (str, optional): ``"default"`` computes float16 and bfloat16 inputs in float32; ``"high"``
            accumulates in float64 on the CPU. Default: ``"default"``.
        block_m (int, optional): Query rows per block. Default: ``None``, chosen by the backend.
        block_n (int, optional): Keys per block. Default: ``None``, chosen by the backend.
        backend (str, optional): ``"cpu"``, ``"ascend"``, ``"ascend-twin"`` or ``"reference"``. Default: ``None``, by
            the environment variable MS_FLASH_BACKEND, otherwise by the device.
        num_heads (int, optional): N. Needed for BSH, SBH and packed QKV. Default: ``None``, from the shape.
        num_kv_heads (int, optional): Nk. Default: ``None``, from the shape, or `num_heads` for BSH, SBH and packed QKV.

    Returns:
        Tensor, the output, in the layout and dtype of `query` with Dv in the place of D; with `return_lse` a tuple of
        it and the LSE, the natural logarithm of the softmax denominators, float32, (B, N, Sq).

    Raises:
        TypeError: If the type or dtype of an argument is wrong. Nothing is cast silently.
        ValueError: If a value is out of its range, shapes do not agree, or the backend is not available.
        RuntimeError: If a second order gradient is asked for.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from ms_flash import flash_attention
        >>> query = ms.Tensor(np.ones((1, 2, 3, 4)), ms.float32)
        >>> value = ms.Tensor(np.arange(6).reshape(1, 2, 3, 1), ms.float32)
        >>> out, lse = flash_attention(query, query, value, causal=True, return_lse=True)
        >>> print(out.shape)
        (1, 2, 3, 1)
        >>> print(out[0, :, :, 0])
        [[0.  0.5 1. ]
         [3.  3.5 4. ]]
        >>> print(lse[0, 0])
        [2.        2.6931472 3.0986123]
    """
    return_lse = checked_flag("flash_attention", "return_lse", return_lse)
    out, lse = attention("flash_attention", query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, None, None,
                         None, dropout_p, softmax_scale, causal, window_size, softcap, layout, causal_align, training,
                         deterministic, precision_mode, block_m, block_n, backend, num_heads, num_kv_heads, None)
    if return_lse:
        return out, lse
    return out


def flash_attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, attn_mask=None, *, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), bias=None, alibi_slopes=None,
                           softcap=0.0, sinks=None, causal_align="bottom_right", seed=None, training=True,
                           return_lse=False, deterministic=True, precision_mode="default", block_m=None, block_n=None,
                           backend=None):
    r"""
    Exact attention over sequences of various lengths laid end to end, without padding (layout TND).

    Sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of `query` and rows cu_seqlens_k[b] to cu_seqlens_k[b + 1]
    of `key` and `value`, and attends to itself only, as :func:`flash_attention` describes; indexes i and j count inside
    the sequence. Sequences may be empty. Rows after the last sequence get output 0, LSE -inf and gradients 0.

    Args:
        query (Tensor): (T, N, D), all queries. Dtype float32, float16 or bfloat16.
        key (Tensor): (Tk, Nk, D). Dtype of `query`.
        value (Tensor): (Tk, Nk, Dv). Dtype of `query`.
        cu_seqlens_q (Tensor): int32 or int64, (batch + 1,): 0, then where each sequence ends, at most T.
        cu_seqlens_k (Tensor): The same for `key` and `value`, at most Tk.
        attn_mask (Union[Tensor, tuple[int]], optional): bool or uint8, True = masked out, (largest query length,
            largest key length), for all sequences. Or a tuple (left, right), the same as `window_size`.
            Default: ``None``.

    Keyword Args:
        dropout_p (float, optional): Probability of dropping an attention weight, in [0, 1). Kept weights are divided by
            1 - `dropout_p`. Default: ``0.0``.
        softmax_scale (float, optional): Factor of query . key. Any finite number, 0 and negative ones included.
            Default: ``None``, which is head_dim ** -0.5.
        causal (bool, optional): Masks out every key behind the diagonal: a right window of 0. Default: ``False``.
        window_size (tuple[int], optional): (left, right), the numbers of keys that a query sees before and after its
            diagonal, both inclusive; -1 is no limit. Default: ``(-1, -1)``.
        bias (None, optional): Not supported for variable lengths. Default: ``None``.
        alibi_slopes (Tensor, optional): float32, (N,) or (batch, N). Not differentiable. Default: ``None``.
        softcap (float, optional): Bound of the scaled scores; 0 is none. Default: ``0.0``.
        sinks (Tensor, optional): (N,), dtype of `query` or float32: one logit per head that takes part in the softmax
            without a value. Default: ``None``.
        causal_align (str, optional): ``"bottom_right"`` or ``"top_left"`` corner of each sequence.
            Default: ``"bottom_right"``.
        seed (Union[int, Tensor], optional): As in :func:`flash_attention`. Default: ``None``.
        training (bool, optional): ``False`` switches dropout off. Default: ``True``.
        return_lse (bool, optional): Whether to return the LSE as well. Default: ``False``.
        deterministic (bool, optional): As in :func:`flash_attention`. Default: ``True``.
        precision_mode (str, optional): ``"default"`` or ``"high"``. Default: ``"default"``.
        block_m (int, optional): Query rows per block. Default: ``None``, chosen by the backend.
        block_n (int, optional): Keys per block. Default: ``None``, chosen by the backend.
        backend (str, optional): As in :func:`flash_attention`. Default: ``None``.

    Returns:
        Tensor, the output (T, N, Dv), dtype of `query`; with `return_lse` a tuple of it and the LSE, the natural
        logarithm of the softmax denominators, float32, (N, T).

    Raises:
        TypeError: If the type or dtype of an argument is wrong.
        ValueError: If a value is out of its range, shapes do not agree, the cumulative lengths do not start with 0,
            decrease, or end after the last row, or the backend is not available.
        RuntimeError: If the cumulative lengths are wrong in a graph, where only the op sees them, or if a second order
            gradient is asked for.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from ms_flash import flash_attention_varlen
        >>> query = ms.Tensor(np.ones((5, 1, 4)), ms.float32)
        >>> value = ms.Tensor(np.arange(5).reshape(5, 1, 1), ms.float32)
        >>> lengths = ms.Tensor([0, 2, 5], ms.int32)
        >>> out = flash_attention_varlen(query, query, value, lengths, lengths)
        >>> print(out[:, 0, 0])
        [0.5 0.5 3.  3.  3. ]
    """
    return_lse = checked_flag("flash_attention_varlen", "return_lse", return_lse)
    out, lse = attention("flash_attention_varlen", query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, None,
                         cu_seqlens_q, cu_seqlens_k, dropout_p, softmax_scale, causal, window_size, softcap, "TND",
                         causal_align, training, deterministic, precision_mode, block_m, block_n, backend, None, None,
                         None)
    if return_lse:
        return out, lse
    return out
