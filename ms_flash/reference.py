"""Attention forward and backward in float64 numpy, written to be read: the truth every backend is compared with.

One head at a time, with the whole (Sq, Sk) score matrix in memory. The order of things, which the kernels follow, is

    score = softcap * tanh(scale * q.k / softcap)        the cap first (if any)
          + bias - slope * |i + shift - j|               then what is added
    score = -inf  outside the window, where bias is -inf and where attn_mask is True (there `mask_fill`, if given)
    p     = exp(score) / (sum_j exp(score) + exp(sink))  softmax; the sink joins the denominator only
    out   = (keep * p / (1 - dropout_p)) @ v             dropout on the probabilities

A position that is not allowed contributes nothing at all, so a NaN or Inf there never reaches a result.

With `rounding` every intermediate is rounded to that dtype, and matrix products accumulate in float32. That is the
naive low-precision computation, whose error is what FlashAttention's rule compares a kernel's error with.
"""
from __future__ import annotations

import numpy as np

_LOW32 = 0xFFFFFFFF


# ---------------------------------------------------------------------------------------------------------------------
# Dropout
# ---------------------------------------------------------------------------------------------------------------------
def philox4x32(counter, key):
    """Philox4x32-10: four uint32 words from a counter (4 arrays or ints that broadcast) and a key (2 ints)."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, np.uint64) for c in counter))
    k0, k1 = (int(k) for k in key)
    low, half = np.uint64(_LOW32), np.uint64(32)
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = ((product1 >> half) ^ c1 ^ np.uint64(k0), product1 & low,
                          (product0 >> half) ^ c3 ^ np.uint64(k1), product0 & low)
        k0, k1 = (k0 + 0x9E3779B9) & _LOW32, (k1 + 0xBB67AE85) & _LOW32
    return tuple(c.astype(np.uint32) for c in (c0, c1, c2, c3))


def philox_uniform(seed, offset, head, sq, sk):
    """The uint32 number drawn for each (query i, key j) of one head (`head` = b * N + n), shape (sq, sk)."""
    seed, offset = int(seed) & (2**64 - 1), int(offset) & (2**64 - 1)
    key = (seed & _LOW32, ((seed >> 32) + (offset >> 32)) & _LOW32)
    i, group = np.arange(sq)[:, None], np.arange((sk + 3) // 4)[None, :]
    words = philox4x32((group, i, head & _LOW32, offset & _LOW32), key)
    return np.stack(words, axis=-1).reshape(sq, 4 * group.size)[:, :sk]


def keep_mask(dropout_p, seed, offset, batch, heads, sq, sk):
    """Which probabilities survive dropout: bool (batch, heads, sq, sk)."""
    threshold = int(dropout_p * 2.0**32)
    keep = [philox_uniform(seed, offset, head, sq, sk) >= threshold for head in range(batch * heads)]
    return np.array(keep, bool).reshape(batch, heads, sq, sk)


# ---------------------------------------------------------------------------------------------------------------------
# Views: dense (B, N, S, D) and packed (T, N, D) arrays both become one (N, S, D) view per sequence
# ---------------------------------------------------------------------------------------------------------------------
def _sequences(x, cu):
    if cu is None:
        return list(x)
    return [x[start:stop].swapaxes(0, 1) for start, stop in zip(cu[:-1], cu[1:])]


def _row_sequences(x, cu):
    """The same for one number per row: (B, N, S), or (N, T)."""
    return list(x) if cu is None else [x[:, start:stop] for start, stop in zip(cu[:-1], cu[1:])]


def _as4d(x):
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _plane(x, b, n, sq, sk):
    """The (sq, sk) part of a broadcastable mask, bias or drop mask that belongs to sequence b and head n."""
    x = _as4d(x)
    x = x[b if x.shape[0] > 1 else 0, n if x.shape[1] > 1 else 0]
    return np.broadcast_to(x[:sq if x.shape[0] > 1 else 1, :sk if x.shape[1] > 1 else 1], (sq, sk))


def _add_to_plane(x, b, n, value):
    """The adjoint of `_plane`: sums `value` over what was broadcast and adds it in place."""
    x = _as4d(x)
    target = x[b if x.shape[0] > 1 else 0, n if x.shape[1] > 1 else 0]
    axes = tuple(axis for axis in (0, 1) if target.shape[axis] == 1)
    target += value.sum(axes, keepdims=True)


# ---------------------------------------------------------------------------------------------------------------------
# One head
# ---------------------------------------------------------------------------------------------------------------------
def band(sq, sk, left, right, align):
    """Bool (sq, sk): the keys inside the window (left, right), inclusive, negative = unlimited."""
    shift = sk - sq if align == "bottom_right" else 0
    distance = np.arange(sk)[None, :] - (np.arange(sq)[:, None] + shift)
    inside = np.ones((sq, sk), bool)
    if left >= 0:
        inside &= distance >= -left
    if right >= 0:
        inside &= distance <= right
    return inside


def _rounder(dtype):
    return (lambda x: x) if dtype is None else (lambda x: x.astype(dtype).astype(np.float64))


def _matmul(a, b, rounding):
    return a @ b if rounding is None else (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float64)


def _product(weights, x, allowed, rounding):
    """weights @ x, in which only allowed (row, column) pairs take part, even when x holds NaN or Inf."""
    finite = np.isfinite(x)
    total = _matmul(weights, np.where(finite, x, 0.0), rounding)
    for j in np.flatnonzero(~finite.all(-1)):
        stray = np.where(finite[j], 0.0, x[j])
        total += np.where(allowed[:, j, None] & ~finite[j], weights[:, j, None] * stray, 0.0)
    return total


def _softmax(call, b, n, q, k):
    """Probabilities of one head and what the backward needs beside them."""
    sq, sk, rnd = len(q), len(k), _rounder(call["rounding"])
    score = rnd(rnd(_matmul(q, k.T, call["rounding"])) * call["scale"])
    slope = np.ones_like(score)                                  # d score / d (scale * q.k)
    if call["softcap"] > 0:
        capped = rnd(np.tanh(rnd(score / call["softcap"])))
        score, slope = rnd(call["softcap"] * capped), rnd(1.0 - capped**2)

    allowed = band(sq, sk, call["left"], call["right"], call["align"])
    live = np.ones_like(allowed)                                 # the score depends on q, k and bias
    added = np.zeros_like(score)
    if call["bias"] is not None:
        added = added + _plane(call["bias"], b, n, sq, sk)
    if call["alibi_slopes"] is not None:
        shift = sk - sq if call["align"] == "bottom_right" else 0
        distance = np.abs(np.arange(sq)[:, None] + shift - np.arange(sk)[None, :])
        added = added - call["alibi_slopes"][b, n] * distance
    score = rnd(score + added)
    forbidden = np.isneginf(added) | np.isneginf(score)
    if call["attn_mask"] is not None:
        masked = _plane(call["attn_mask"], b, n, sq, sk)
        if call["mask_fill"] is None:
            forbidden = forbidden | masked
        else:
            score = np.where(masked, call["mask_fill"], score)
            forbidden, live = forbidden & ~masked, ~masked
    allowed &= ~forbidden
    score = np.where(allowed, score, -np.inf)

    sink = -np.inf if call["sinks"] is None else call["sinks"][n]
    row_max = np.maximum(score.max(-1, initial=-np.inf), sink)
    shift_by = np.where(np.isneginf(row_max), 0.0, row_max)      # an empty row has no maximum to subtract
    weight = np.where(allowed, rnd(np.exp(score - shift_by[:, None])), 0.0)
    sink_weight = np.exp(sink - shift_by)
    row_sum = weight.sum(-1) + sink_weight
    divisor = np.where(row_sum == 0, 1.0, row_sum)

    kept = 1.0                                                   # factor of each probability after dropout
    if call["drop_mask"] is not None:
        kept = _plane(call["drop_mask"], b, n, sq, sk) / (1.0 - call["dropout_p"])
    elif call["dropout_p"] > 0:
        drawn = philox_uniform(call["seed"], call["offset"], b * call["heads"] + n, sq, sk)
        kept = (drawn >= int(call["dropout_p"] * 2.0**32)) / (1.0 - call["dropout_p"])
    p = np.where(allowed, rnd(weight / divisor[:, None]), 0.0)   # a NaN divisor must not reach what is not allowed
    return {"p": p, "sink_p": sink_weight / divisor, "kept": kept, "slope": slope, "allowed": allowed,
            "live": live & allowed, "row_max": row_max, "row_sum": row_sum}


# ---------------------------------------------------------------------------------------------------------------------
# All heads of all sequences
# ---------------------------------------------------------------------------------------------------------------------
def _float64(x):
    return None if x is None else np.asarray(x).astype(np.float64)


def _prepare(q, k, v, attn_mask, bias, alibi_slopes, sinks, drop_mask, cu_q, cu_k, **options):
    """The problem as one dict: float64 arrays of known shape, and the options."""
    q, k, v, bias, alibi_slopes, sinks = (_float64(x) for x in (q, k, v, bias, alibi_slopes, sinks))
    varlen = cu_q is not None
    if varlen != (cu_k is not None):
        raise ValueError("For 'reference.forward', 'cu_q' and 'cu_k' must be given together.")
    if varlen:
        if bias is not None:
            raise ValueError("For 'reference.forward', 'bias' must be None when 'cu_q' is given.")
        cu_q, cu_k = (np.asarray(cu).astype(np.int64) for cu in (cu_q, cu_k))
    heads, kv_heads = q.shape[1], k.shape[1]
    batch = len(cu_q) - 1 if varlen else q.shape[0]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"For 'reference.forward', the query heads must be a multiple of the key heads, but got "
                         f"{heads} and {kv_heads}.")
    if q.shape[-1] == 0 or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"For 'reference.forward', the 'head_dim' of 'key' must be equal to that of 'query' "
                         f"{q.shape[-1]} and positive, but got {k.shape[-1]}.")
    attn_mask = None if attn_mask is None else np.asarray(attn_mask).astype(bool)
    drop_mask = None if drop_mask is None else np.asarray(drop_mask).astype(bool)
    if not varlen:
        for name, x in (("attn_mask", attn_mask), ("bias", bias), ("drop_mask", drop_mask)):
            full = (batch, heads, q.shape[2], k.shape[2])
            if x is not None and (x.ndim > 4 or any(a not in (1, b) for a, b in zip(x.shape[::-1], full[::-1]))):
                raise ValueError(f"For 'reference.forward', '{name}' of shape {x.shape} does not broadcast to {full}.")
    if alibi_slopes is not None:
        alibi_slopes = np.broadcast_to(alibi_slopes, (batch, heads))
    if options["scale"] is None:
        options["scale"] = q.shape[-1] ** -0.5
    return dict(q=q, k=k, v=v, attn_mask=attn_mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks,
                drop_mask=drop_mask, cu_q=cu_q, cu_k=cu_k, heads=heads, group=heads // kv_heads, **options)


def forward(q, k, v, *, attn_mask=None, bias=None, alibi_slopes=None, sinks=None, drop_mask=None, cu_q=None, cu_k=None,
            scale=None, left=-1, right=-1, align="bottom_right", softcap=0.0, dropout_p=0.0, seed=0, offset=0,
            mask_fill=None, rounding=None):
    """Attention in float64.

    Args:
        q (ndarray): Queries (B, N, Sq, D), or (T, N, D) when `cu_q` is given. Any float dtype, bfloat16 included.
        k (ndarray): Keys (B, Nk, Sk, D), or (Tk, Nk, D). N % Nk == 0; query head n uses key head n // (N / Nk).
        v (ndarray): Values (B, Nk, Sk, Dv), or (Tk, Nk, Dv).
        attn_mask (ndarray): True (nonzero) = masked out; broadcastable to (B, N, Sq, Sk). With `cu_q` the last two
            axes are indexes inside a sequence. Default: ``None``.
        bias (ndarray): Added to the scaled (and capped) scores; broadcastable; -inf is a mask. Default: ``None``.
        alibi_slopes (ndarray): (N,) or (B, N). Default: ``None``.
        sinks (ndarray): (N,), one more logit per head in the softmax denominator. Default: ``None``.
        drop_mask (ndarray): 1 = keep; broadcastable; replaces the drawn mask. Default: ``None``.
        cu_q (ndarray): Cumulative query lengths (batch + 1,). Default: ``None``.
        cu_k (ndarray): Cumulative key lengths (batch + 1,). Default: ``None``.
        scale (float): Factor of q.k; ``None`` is D ** -0.5. Default: ``None``.
        left (int): Keys visible before the diagonal; negative = all. Default: ``-1``.
        right (int): Keys visible after the diagonal; 0 = causal; negative = all. Default: ``-1``.
        align (str): Diagonal through the "bottom_right" or the "top_left" corner. Default: ``"bottom_right"``.
        softcap (float): 0 = none. Default: ``0.0``.
        dropout_p (float): Share of probabilities dropped, in [0, 1). Default: ``0.0``.
        seed (int): Key of the dropout mask. Default: ``0``.
        offset (int): Position of the dropout mask in the stream of `seed`. Default: ``0``.
        mask_fill (float): Score of positions where `attn_mask` is True, instead of -inf. Default: ``None``.
        rounding (dtype): Round every intermediate to this numpy dtype, here and in `backward`. Default: ``None``.

    Returns:
        tuple (out, lse, saved): out (B, N, Sq, Dv) or (T, N, Dv); lse, natural log, (B, N, Sq) or (N, T), -inf for a
        row without keys; saved, a dict for `backward` that also holds row_max and row_sum, shaped like lse.
    """
    call = _prepare(q, k, v, attn_mask, bias, alibi_slopes, sinks, drop_mask, cu_q, cu_k, scale=scale, left=left,
                    right=right, align=align, softcap=softcap, dropout_p=dropout_p, seed=seed, offset=offset,
                    mask_fill=mask_fill, rounding=rounding)
    rnd = _rounder(rounding)
    q, k, v, cu_q, cu_k = (call[name] for name in ("q", "k", "v", "cu_q", "cu_k"))
    out = np.zeros(q.shape[:-1] + v.shape[-1:])
    rows = q.shape[:-1] if cu_q is None else (q.shape[1], q.shape[0])
    row_max, row_sum = np.full(rows, -np.inf), np.zeros(rows)
    sequences = zip(_sequences(q, cu_q), _sequences(k, cu_k), _sequences(v, cu_k), _sequences(out, cu_q),
                    _row_sequences(row_max, cu_q), _row_sequences(row_sum, cu_q))
    with np.errstate(all="ignore"):
        for b, (qs, ks, vs, outs, maxs, sums) in enumerate(sequences):
            for n in range(call["heads"]):
                h = n // call["group"]
                head = _softmax(call, b, n, qs[n], ks[h])
                outs[n] = rnd(_product(rnd(head["p"] * head["kept"]), vs[h], head["allowed"], rounding))
                maxs[n], sums[n] = head["row_max"], head["row_sum"]
        lse = np.where(row_sum == 0, -np.inf, row_max + np.log(row_sum))
    return out, lse, dict(call, out=out, row_max=row_max, row_sum=row_sum)


def backward(dout, dlse, saved):
    """Gradients of sum(dout * out) + sum(dlse * lse), for the call that `forward` saved.

    Args:
        dout (ndarray): Shaped like out.
        dlse (ndarray): Shaped like lse, or ``None`` for zero.
        saved (dict): Third result of `forward`.

    Returns:
        dict of float64 arrays dq, dk, dv, dbias, dsinks, each shaped like its input; ``None`` where there is no input.
    """
    call, dout, rounding = saved, _float64(dout), saved["rounding"]
    cu_q, cu_k, rnd = call["cu_q"], call["cu_k"], _rounder(rounding)
    dlse = np.zeros_like(call["row_sum"]) if dlse is None else _float64(dlse)
    dq, dk, dv = (np.zeros_like(call[name]) for name in ("q", "k", "v"))
    dbias = None if call["bias"] is None else np.zeros_like(call["bias"])
    dsinks = None if call["sinks"] is None else np.zeros_like(call["sinks"])
    sequences = zip(*(_sequences(x, cu) for x, cu in (
        (call["q"], cu_q), (call["k"], cu_k), (call["v"], cu_k), (call["out"], cu_q), (dout, cu_q),
        (dq, cu_q), (dk, cu_k), (dv, cu_k))), _row_sequences(dlse, cu_q))
    with np.errstate(all="ignore"):
        for b, (qs, ks, vs, outs, douts, dqs, dks, dvs, dlses) in enumerate(sequences):
            for n in range(call["heads"]):
                h = n // call["group"]
                head = _softmax(call, b, n, qs[n], ks[h])
                p, allowed, live = head["p"], head["allowed"], head["live"]
                empty = ~allowed.any(-1)
                dvs[h] += rnd(_product(rnd(p * head["kept"]).T, douts[n], allowed.T, rounding))
                dp = np.where(allowed, _dropped(head["kept"], rnd(_matmul(douts[n], vs[h].T, rounding))), 0.0)
                # how the row as a whole pulls on every score: through out, and through lse
                row = dlses[n] - np.where(empty, 0.0, rnd((douts[n] * outs[n]).sum(-1)))
                ds = np.where(live, rnd(p * (dp + row[:, None])), 0.0)
                if dbias is not None:
                    _add_to_plane(dbias, b, n, ds)
                if dsinks is not None:
                    dsinks[n] += np.where(head["row_sum"] == 0, 0.0, head["sink_p"] * row).sum()
                ds = np.where(live, rnd(ds * head["slope"]), 0.0)
                dqs[n] = rnd(_product(ds, ks[h], live, rounding) * call["scale"])
                dks[h] += rnd(_product(ds.T, qs[n], live.T, rounding) * call["scale"])
    grads = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": dsinks}
    return {name: None if grad is None else rnd(grad) for name, grad in grads.items()}


def _dropped(kept, x):
    """kept * x, where a dropped element is 0 whatever x holds."""
    return np.where(kept == 0, 0.0, kept * x)


# ---------------------------------------------------------------------------------------------------------------------
# A cache of keys and values
# ---------------------------------------------------------------------------------------------------------------------
def rotate(x, cos, sin, position, interleaved=False):
    """Rotary embedding of one sequence, (N, S, D): row i by line position + i of cos and sin (positions, R / 2)."""
    x, pairs = _float64(x).copy(), cos.shape[1]
    cos, sin = (_float64(table)[position:position + x.shape[1]] for table in (cos, sin))
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (
        slice(0, pairs), slice(pairs, 2 * pairs))
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin
    return x


def kvcache_forward(q, k_cache, v_cache, k, v, seqlens, *, block_table=None, cos=None, sin=None, interleaved=False,
                    alibi_slopes=None, sinks=None, **options):
    """Attention over a cache, to which k and v are appended first.

    Args:
        q (ndarray): Queries (B, N, Sq, D).
        k_cache (ndarray): (B, Nk, Smax, D), or (blocks, Nk, block_size, D) with `block_table`.
        v_cache (ndarray): The same with Dv.
        k (ndarray): Keys to append (B, Nk, Sn, D), or ``None``.
        v (ndarray): Values to append (B, Nk, Sn, Dv), or ``None``.
        seqlens (ndarray): Tokens in the cache of each sequence, before.
        block_table (ndarray): (B, max_blocks), blocks of each sequence. Default: ``None``.
        cos (ndarray): Rotary embedding, (positions, R / 2). Default: ``None``.
        sin (ndarray): Of the same shape. Default: ``None``.
        interleaved (bool): Pairs are channels 2c and 2c + 1. Default: ``False``.
        alibi_slopes (ndarray): As in `forward`. Default: ``None``.
        sinks (ndarray): As in `forward`. Default: ``None``.
        options: Of `forward`.

    Returns:
        tuple (out, lse, k_cache, v_cache): as `forward`, and copies of the caches with the new tokens.
    """
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    outs, lses, sq = [], [], q.shape[2]
    for b, length in enumerate(int(n) for n in seqlens):
        total = length + (0 if k is None else k.shape[2])
        rows = np.arange(total)
        block, row = (np.full(total, b), rows) if block_table is None else (
            block_table[b][rows // k_cache.shape[2]].astype(np.int64), rows % k_cache.shape[2])
        if k is not None:
            new = k[b] if cos is None else rotate(k[b], cos, sin, length, interleaved)
            k_cache[block[length:], :, row[length:]] = new.swapaxes(0, 1).astype(k_cache.dtype)
            v_cache[block[length:], :, row[length:]] = v[b].swapaxes(0, 1)
        queries = q[b] if cos is None else rotate(q[b], cos, sin, total - sq, interleaved)
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.ndim == 1 else alibi_slopes[b]
        out, lse, _ = forward(queries[None], k_cache[block, :, row].swapaxes(0, 1)[None],
                              v_cache[block, :, row].swapaxes(0, 1)[None], alibi_slopes=slopes, sinks=sinks, **options)
        outs.append(out[0])
        lses.append(lse[0])
    return np.stack(outs), np.stack(lses), k_cache, v_cache


def merge(outs, lses):
    """Attention over all keys from outputs (parts, ..., Dv) and log-sum-exps (parts, ...) over parts of them."""
    outs, lses = _float64(outs), _float64(lses)
    with np.errstate(all="ignore"):
        top = lses.max(0)
        weights = np.where(np.isneginf(lses), 0.0, np.where(lses == top, 1.0, np.exp(lses - top)))
        total = weights.sum(0)
        share = np.where(weights == 0, 0.0, weights / total)[..., None]
        return np.where(share == 0, 0.0, share * outs).sum(0), np.where(total == 0, -np.inf, top + np.log(total))


# ---------------------------------------------------------------------------------------------------------------------
# The block: projections around attention
# ---------------------------------------------------------------------------------------------------------------------
def _projections(given, heads, kv_heads, interleaved):
    """For queries, keys and values: name of their source, suffix of their weight, and their channels of it."""
    slots = ["q", "q" if given.get("w_k") is None else "k"]
    slots.append(slots[1] if given.get("w_v") is None else "v")
    source_k = "x" if given.get("context") is None else "context"
    sources = ["x", source_k, source_k if given.get("context_v") is None else "context_v"]
    counts = (heads, kv_heads, kv_heads)
    for part, (source, slot, count) in enumerate(zip(sources, slots, counts)):
        before = sum(n for s, n in zip(slots[:part], counts) if s == slot)
        parts, total = slots.count(slot), sum(n for s, n in zip(slots, counts) if s == slot)
        d = given["w_" + slot].shape[0] // total
        if interleaved and parts > 1:
            channels = np.arange(parts * count * d).reshape(count, parts, d)[:, part - slots.index(slot)].ravel()
        else:
            channels = np.arange(before * d, (before + count) * d)
        yield source, slot, count, channels


def _linear(x, weight, bias, rounding):
    rnd = _rounder(rounding)
    y = rnd(_matmul(x, weight.T, rounding))
    return y if bias is None else rnd(y + bias)


def mha_forward(given, *, num_heads, num_kv_heads=None, transposed=(False,) * 4, interleaved=False, rounding=None,
                **options):
    """Projections, attention and output projection in float64.

    Args:
        given (dict): Arrays by the slot names of `mha_inputs` in ops.yaml, activations as (B, S, E).
        num_heads (int): Heads of the queries.
        num_kv_heads (int): Heads of keys and values. Default: ``None``, `num_heads`.
        transposed (tuple): For w_q, w_k, w_v, w_o: stored (in, out).
        interleaved (bool): Packed weights are ordered (head, part, channel). Default: ``False``.
        rounding (dtype): As in `forward`.
        options: Those of `forward`.

    Returns:
        tuple (y, saved): y (B, Sq, out); saved, a dict for `mha_backward` that also holds q, k, v and attn.
    """
    num_kv_heads = num_kv_heads or num_heads
    tensors = ("x", "context", "context_v", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_o", "b_o")
    block = {name: _float64(given.get(name)) for name in tensors}
    for name, turned in zip(("w_q", "w_k", "w_v", "w_o"), transposed):
        if turned and block[name] is not None:
            block[name] = block[name].T
    projections = list(_projections(block, num_heads, num_kv_heads, interleaved))
    projected = []
    for source, slot, _, channels in projections:
        bias = block["b_" + slot]
        projected.append(_linear(block[source], block["w_" + slot][channels], None if bias is None else bias[channels],
                                 rounding))
    q, k, v = (x.reshape(x.shape[:2] + (count, -1)).swapaxes(1, 2) for x, (_, _, count, _) in
               zip(projected, projections))
    rest = {name: given.get(name) for name in ("attn_mask", "bias", "alibi_slopes", "sinks", "drop_mask")}
    out, _, saved = forward(q, k, v, **rest, rounding=rounding, **options)
    attn = out.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1)
    y = attn if block["w_o"] is None else _linear(attn, block["w_o"], block["b_o"], rounding)
    return y, {"block": block, "projections": projections, "attention": saved, "attn": attn, "projected": projected,
               "transposed": transposed, "rounding": rounding}


def mha_backward(dy, saved):
    """Gradients of sum(dy * y) for the call that `mha_forward` saved.

    Args:
        dy (ndarray): Shaped like y.
        saved (dict): Second result of `mha_forward`.

    Returns:
        dict of float64 arrays by "d" and the name of an input; inputs that were not given are left out.
    """
    block, rounding = saved["block"], saved["rounding"]
    rnd, flat = _rounder(rounding), lambda x: x.reshape(-1, x.shape[-1])
    product = lambda a, b: rnd(_matmul(a, b, rounding))
    dy = _float64(dy)
    grads = {name: np.zeros_like(x) for name, x in block.items() if x is not None}
    dattn = dy
    if block["w_o"] is not None:
        dattn = product(dy, block["w_o"])
        grads["w_o"] = product(flat(dy).T, flat(saved["attn"]))
        if block["b_o"] is not None:
            grads["b_o"] = rnd(flat(dy).sum(0))
    batch, length = dy.shape[:2]
    heads = dattn.reshape(batch, length, saved["attention"]["heads"], -1).swapaxes(1, 2)
    inner = backward(heads, None, saved["attention"])
    for (source, slot, _, channels), name in zip(saved["projections"], ("dq", "dk", "dv")):
        d = inner[name].swapaxes(1, 2).reshape(batch, -1, len(channels))
        grads[source] = rnd(grads[source] + product(d, block["w_" + slot][channels]))
        grads["w_" + slot][channels] = product(flat(d).T, flat(block[source]))
        if block["b_" + slot] is not None:
            grads["b_" + slot][channels] = rnd(flat(d).sum(0))
    for name, turned in zip(("w_q", "w_k", "w_v", "w_o"), saved["transposed"]):
        if turned and name in grads:
            grads[name] = grads[name].T
    grads.update({name: inner["d" + name] for name in ("bias", "sinks") if inner["d" + name] is not None})
    return {"d" + name: grad for name, grad in grads.items()}
