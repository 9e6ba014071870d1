"""Attention over a cache of keys and values, for generation. MindSpore parses these functions: imported names only."""

from __future__ import annotations

from mindspore import ops
from mindspore.common import dtype as mstype

from ms_flash.ascend_call import kvcache_on_ascend
from ms_flash.functional import _or_placeholder
from ms_flash.kvcache_resolve import dtype_of_parts, resolve_kvcache, resolve_merge
from ms_flash.resolve import checked_flag, op_of


def _nothing(query, shapes):
    """Output and LSE without elements."""
    return ops.zeros(shapes[0], query.dtype), ops.zeros(shapes[1], mstype.float32)


def flash_attention_with_kvcache(query, k_cache, v_cache, k=None, v=None, *, cache_seqlens, block_table=None,
                                 rotary_cos=None, rotary_sin=None, rotary_interleaved=False, softmax_scale=None,
                                 causal=True, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None,
                                 layout="BSND", num_splits=0, return_lse=False, precision_mode="default",
                                 backend=None):
    r"""
    Attention of new queries over a cache of keys and values, to which the new keys and values are appended in place.

    Sequence b has cache_seqlens[b] tokens in its cache. The Sn tokens of `k` and `v`, if given, are written behind
    them, and the queries attend to all of them, :math:`t_b = cache\_seqlens_b + Sn`, as :func:`flash_attention`
    describes, with the diagonal in the bottom right corner: the last query sees the last key, and with `causal` query i
    sees the keys up to :math:`t_b - Sq + i`. Sq = 1 decodes, a few queries check speculated tokens, a whole prompt
    prefills. Rows of the cache behind the tokens of a sequence are never read; a sequence without any gives output 0
    and LSE -inf (with `sinks`, the logit of its head). Lengths and blocks are values of Tensors: a compiled graph takes
    any of them. B and Sq may be 0: nothing comes out then, and what there is to append is appended.

    A paged cache is a pool of blocks, from which `block_table` gives each sequence its own. Sequences may share blocks
    that they only read; a block that is appended to belongs to one sequence.

    There is no gradient. B is the batch size, N the heads of the query, Nk those of the cache (N a multiple of Nk), D
    the head_dim, Dv that of the values.

    Args:
        query (Tensor): (B, Sq, N, D); for layout BNSD (B, N, Sq, D). Dtype float32, float16 or bfloat16.
        k_cache (Union[Tensor, Parameter]): (B, Smax, Nk, D), or with `block_table` (num_blocks, block_size, Nk, D); for
            layout BNSD (B, Nk, Smax, D) or (num_blocks, Nk, block_size, D). Dtype of `query`. If `k` is given, it must
            have memory of its own, and be no view of another Tensor; in a graph it is a Parameter.
        v_cache (Union[Tensor, Parameter]): As `k_cache`, with Dv.
        k (Tensor, optional): (B, Sn, Nk, D), or (B, Nk, Sn, D): the keys to append. Dtype of `query`.
            Default: ``None``.
        v (Tensor, optional): The values to append, as `k` with Dv. Default: ``None``.

    Keyword Args:
        cache_seqlens (Tensor): int32 or int64, (B,): the tokens in the cache before `k` and `v` are appended.
        block_table (Tensor, optional): int32 or int64, (B, max_blocks): the blocks of each sequence in their order.
            Entries behind those in use may hold anything. Default: ``None``.
        rotary_cos (Tensor, optional): (positions, R / 2), dtype of `query` or float32: cosines of the rotary embedding
            of the first R channels, R at most D. `query` is rotated by its positions :math:`t_b - Sq + i`, `k` before
            it is written; what is in the cache is taken as rotated. Default: ``None``.
        rotary_sin (Tensor, optional): The sines, of the same shape. Default: ``None``.
        rotary_interleaved (bool, optional): Pairs are channels 2c and 2c + 1; otherwise c and c + R / 2.
            Default: ``False``.
        softmax_scale (float, optional): Factor of query . key. Default: ``None``, which is head_dim ** -0.5.
        causal (bool, optional): Masks out every key behind the diagonal. Default: ``True``.
        window_size (tuple[int], optional): (left, right), the numbers of keys that a query sees before and after its
            diagonal, both inclusive; -1 is no limit. Default: ``(-1, -1)``.
        softcap (float, optional): Bound of the scaled scores; 0 is none. Default: ``0.0``.
        alibi_slopes (Tensor, optional): float32, (N,) or (B, N). Default: ``None``.
        sinks (Tensor, optional): (N,), dtype of `query` or float32: one logit per head that takes part in the softmax
            without a value. Default: ``None``.
        layout (str, optional): ``"BSND"`` or ``"BNSD"``. Default: ``"BSND"``.
        num_splits (int, optional): Parts into which the keys of a query are cut, computed side by side and merged in
            their order. Default: ``0``, chosen by the backend by the work of the whole batch; with another number the
            bits of a sequence do not depend on what else is in its batch.
        return_lse (bool, optional): Whether to return the LSE as well. Default: ``False``.
        precision_mode (str, optional): ``"default"`` computes in float32, ``"high"`` accumulates in float64 on the CPU.
            Default: ``"default"``.
        backend (str, optional): ``"cpu"``, ``"ascend"``, ``"ascend-twin"`` or ``"reference"``. Default: ``None``, by
            the environment variable MS_FLASH_BACKEND, otherwise by the device. ``"ascend"`` takes a head_dim that is a
            multiple of 16, and caches that are Parameters.

    Returns:
        Tensor, the output, of the shape of `query` with Dv in the place of D, in its dtype; with `return_lse` a tuple
        of it and the LSE, the natural logarithm of the softmax denominators, float32, (B, N, Sq).

    Raises:
        TypeError: If the type or dtype of an argument is wrong. Nothing is cast silently.
        ValueError: If a value is out of its range, shapes do not agree or an axis other than B and Sq is 0, a
            sequence does not fit its cache or the rotary table, a block does not exist, a block to append to is used
            twice, or the backend is not available. The cache is as it was.
        RuntimeError: If lengths or blocks are wrong in a graph, where only the op sees them (the cache is as it was),
            or if a gradient is asked for. MindSpore does not run that compiled graph again. On Ascend the kernel
            sees them in a graph, and makes the rows and LSE of the sequence NaN.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from ms_flash import flash_attention_with_kvcache
        >>> k_cache = ms.Parameter(ms.Tensor(np.zeros((1, 8, 1, 4)), ms.float32), name="k_cache")
        >>> v_cache = ms.Parameter(ms.Tensor(np.zeros((1, 8, 1, 1)), ms.float32), name="v_cache")
        >>> x = ms.Tensor(np.ones((1, 1, 1, 4)), ms.float32)
        >>> for step in range(3):
        ...     value = ms.Tensor(np.full((1, 1, 1, 1), step), ms.float32)
        ...     lengths = ms.Tensor([step], ms.int32)
        ...     out = flash_attention_with_kvcache(x, k_cache, v_cache, x, value, cache_seqlens=lengths)
        ...     print(out[0, 0, 0, 0])
        0.0
        0.5
        1.0
        >>> print(v_cache[0, :, 0, 0])
        [0. 1. 2. 0. 0. 0. 0. 0.]
    """
    return_lse = checked_flag("flash_attention_with_kvcache", "return_lse", return_lse)
    handle, takes_none, returns_caches, form, empty = resolve_kvcache(
        backend, query, k_cache, v_cache, k, v, cache_seqlens, block_table, rotary_cos, rotary_sin, alibi_slopes, sinks,
        rotary_interleaved, softmax_scale, causal, window_size, softcap, layout, num_splits, precision_mode)
    if empty is not None:
        if empty[2] is None:
            out, lse = _nothing(query, empty)
            if return_lse:
                return out, lse
            return out
        query = ops.zeros(empty[2], query.dtype)
    if not takes_none:
        k, v, block_table = _or_placeholder(k), _or_placeholder(v), _or_placeholder(block_table)
        rotary_cos, rotary_sin = _or_placeholder(rotary_cos), _or_placeholder(rotary_sin)
        alibi_slopes, sinks = _or_placeholder(alibi_slopes), _or_placeholder(sinks)
    op = op_of(handle)
    if form is not None:
        outs = kvcache_on_ascend(op, form, query, k_cache, v_cache, k, v, cache_seqlens, block_table, rotary_cos,
                                 rotary_sin, alibi_slopes, sinks)
    else:
        outs = op(query, k_cache, v_cache, k, v, cache_seqlens, block_table, rotary_cos, rotary_sin, alibi_slopes,
                  sinks)
    if returns_caches:
        k_cache.copy_(ops.stop_gradient(outs[2]))
        v_cache.copy_(ops.stop_gradient(outs[3]))
    out, lse = outs[0], outs[1]
    if empty is not None:
        out, lse = _nothing(query, empty)
    if return_lse:
        return out, lse
    return out


def merge_attention(outs, lses, *, layout="BNSD", backend=None):
    r"""
    Attention over all keys from attentions of the same queries over parts of the keys.

    .. math::
        lse = \log \sum_k e^{lse_k}, \quad out = \sum_k e^{lse_k - lse} \cdot out_k

    The parts are added in their order. One whose LSE is -inf had no key and counts for nothing, whatever its output
    holds. There is no gradient.

    Args:
        outs (Union[Tensor, list[Tensor], tuple[Tensor]]): The outputs, (B, N, Sq, Dv) each, or (B, Sq, N, Dv) for
            layout BSND; or all of them stacked, with the parts as a first axis. Dtype float32, float16 or bfloat16.
        lses (Union[Tensor, list[Tensor], tuple[Tensor]]): Their LSEs, (B, N, Sq) each, or stacked likewise. float32.

    Keyword Args:
        layout (str, optional): Of the outputs, ``"BNSD"`` or ``"BSND"``. Default: ``"BNSD"``.
        backend (str, optional): As in :func:`flash_attention_with_kvcache`. Default: ``None``.

    Returns:
        tuple(Tensor, Tensor), output and LSE over all keys.

    Raises:
        TypeError: If the type or dtype of an argument is wrong.
        ValueError: If shapes do not agree or the backend is not available.
        RuntimeError: If a gradient is asked for.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from ms_flash import flash_attention, merge_attention
        >>> query = ms.Tensor(np.ones((1, 1, 1, 4)), ms.float32)
        >>> keys = ms.Tensor(np.ones((1, 1, 3, 4)), ms.float32)
        >>> values = ms.Tensor(np.arange(3).reshape(1, 1, 3, 1), ms.float32)
        >>> first = flash_attention(query, keys[:, :, :2], values[:, :, :2], return_lse=True)
        >>> second = flash_attention(query, keys[:, :, 2:], values[:, :, 2:], return_lse=True)
        >>> out, lse = merge_attention([first[0], second[0]], [first[1], second[1]])
        >>> print(out[0, 0, 0, 0], lse[0, 0, 0])
        1.0 3.0986123
    """
    if isinstance(outs, (list, tuple)):
        if dtype_of_parts("outs", *outs) == "bfloat16":     # MindSpore's Stack has none on the CPU
            outs = ops.stack([x.astype(mstype.float32) for x in outs]).astype(mstype.bfloat16)
        else:
            outs = ops.stack(outs)
    if isinstance(lses, (list, tuple)) and dtype_of_parts("lses", *lses) is not None:
        lses = ops.stack(lses)
    handle, attribute = resolve_merge(backend, layout, outs, lses)
    op = op_of(handle)
    if attribute is None:
        merged = op(outs, lses)
    else:
        merged = op(outs, lses, attribute)
    return merged[0], merged[1]
