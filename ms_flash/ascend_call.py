"""A call of an op on Ascend: what its kernels want, made of what the other backends take.

MindSpore compiles these functions into graphs.
"""

from __future__ import annotations

from mindspore import ops
from mindspore.common import dtype as mstype


def _padded(x, heads, zeros):
    """`x` with `zeros` zeros behind every row; the last axis holds `heads` rows side by side."""
    if zeros == 0:
        return x
    shape = x.shape
    rows = x.reshape(shape[:-1] + (heads, shape[-1] // heads))
    rows = ops.cat((rows, ops.zeros(rows.shape[:-1] + (zeros,), rows.dtype)), -1)
    return rows.reshape(shape[:-1] + (shape[-1] + heads * zeros,))


def _trimmed(x, heads, zeros):
    """The reverse of `_padded`."""
    if zeros == 0:
        return x
    shape = x.shape
    size = shape[-1] // heads - zeros
    rows = x.reshape(shape[:-1] + (heads, size + zeros))[..., :size]
    return rows.reshape(shape[:-1] + (heads * size,))


def call_on_ascend(op, form, query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k):
    """Output and LSE. `form` is what `AscendBackend.form` says of the request."""
    attribute, packed, zeros, v_zeros, q_heads, k_heads, out_heads = form
    query = _padded(query, q_heads, zeros)
    if packed:
        key, value = query, query
    else:
        key, value = _padded(key, k_heads, zeros), _padded(value, k_heads, v_zeros)
    outs = op(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k, attribute)
    return _trimmed(outs[0], out_heads, v_zeros), outs[1]


def _rotated(x, positions, cos, sin, seq_axis, interleaved):
    """`x`, whose rows are at `positions` (B, S), turned by their angles, in float32, and rounded once."""
    positions, pairs, wide = positions.expand_dims(3 - seq_axis), cos.shape[1], x.astype(mstype.float32)
    c, s = ops.gather(cos, positions, 0).astype(mstype.float32), ops.gather(sin, positions, 0).astype(mstype.float32)
    if interleaved:
        a, b = wide[..., 0:2 * pairs:2], wide[..., 1:2 * pairs:2]
        turned = ops.stack((a * c - b * s, b * c + a * s), -1).reshape(x.shape[:-1] + (2 * pairs,))
    else:
        a, b = wide[..., :pairs], wide[..., pairs:2 * pairs]
        turned = ops.cat((a * c - b * s, b * c + a * s), -1)
    if 2 * pairs < x.shape[-1]:
        turned = ops.cat((turned, wide[..., 2 * pairs:]), -1)
    return turned.astype(x.dtype)


def kvcache_on_ascend(op, form, query, k_cache, v_cache, k, v, cache_seqlens, block_table, rotary_cos, rotary_sin,
                      alibi_slopes, sinks):
    """Output and LSE of attention over caches. `form` is what `AscendBackend.kvcache_form` says of the request."""
    attribute, seq_axis, new_len, interleaved = form
    if rotary_cos is not None:
        lengths = cache_seqlens.astype(mstype.int32).reshape((-1, 1))
        queries = query.shape[seq_axis]
        query = _rotated(query, lengths + (new_len - queries) + ops.arange(queries).astype(mstype.int32), rotary_cos,
                         rotary_sin, seq_axis, interleaved)
        if k is not None:
            k = _rotated(k, lengths + ops.arange(new_len).astype(mstype.int32), rotary_cos, rotary_sin, seq_axis,
                         interleaved)
    outs = op(query, k_cache, v_cache, k, v, cache_seqlens, block_table, None, None, alibi_slopes, sinks, attribute)
    return outs[0], outs[1]
