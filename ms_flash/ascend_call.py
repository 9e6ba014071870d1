"""A call of the attention op on Ascend: what its kernels want, made of what the other backends take.

MindSpore compiles these functions into graphs.
"""

from __future__ import annotations

from mindspore import ops


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
