"""The node ``ai.msflash::FlashAttention`` in Triton: the forward on tensor cores, of everything the node can do.

A program owns a block of queries of one head and walks over blocks of keys. Blocks that every one of its queries sees
whole need no test; at the edges of the band, and wherever there is a mask, each (query, key) is tested, and what is not
allowed contributes nothing, even where K or V hold NaN or Inf there.

With ``TRITON_INTERPRET=1`` it runs on the CPU. Needs torch and triton; nothing else of this package imports it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
UNLIMITED = 1 << 30


@triton.jit
def _tiles(acc, row_max, row_sum, q, k_base, v_base, m_base, lo, hi, begin, end, stride_kn, stride_kd, stride_vn,
           stride_vd, stride_mk, D, DV, scale, inverse_cap, cap,
           MASK: tl.constexpr, EDGE: tl.constexpr, SOFTCAP: tl.constexpr, TO_LOG2: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Online softmax over the keys [lo, hi), a multiple of BLOCK_N of them unless EDGE."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    for j0 in range(lo, hi, BLOCK_N):
        keys = j0 + tl.arange(0, BLOCK_N)
        stored = (keys < hi)[:, None] if EDGE else (keys >= 0)[:, None]
        far = keys.to(tl.int64)[:, None]
        k = tl.load(k_base + far * stride_kn + d[None, :] * stride_kd, mask=stored & (d < D)[None, :], other=0.0)
        v = tl.load(v_base + far * stride_vn + dv[None, :] * stride_vd, mask=stored & (dv < DV)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            # tanh from exp2, with an argument that cannot overflow
            x = s * inverse_cap
            e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
            s = cap * tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
        else:
            s = s * scale
        allowed = keys[None, :] >= 0
        if EDGE:
            allowed = (keys[None, :] >= begin[:, None]) & (keys[None, :] < end[:, None])
            if MASK != 0:
                m = tl.load(m_base + keys.to(tl.int64)[None, :] * stride_mk, mask=allowed, other=0)
                if MASK == 1:
                    allowed = allowed & (m != 0)
                else:
                    m = m.to(tl.float32)
                    allowed = allowed & (m != float("-inf"))
                    s = s + m
            s = tl.where(allowed, s, float("-inf"))
        largest = tl.maximum(row_max, tl.max(s, 1))
        base = tl.where(largest == float("-inf"), 0.0, largest)     # no key so far: every weight is 0
        p = tl.exp2((s - base[:, None]) * TO_LOG2)
        shrink = tl.exp2((row_max - base) * TO_LOG2)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        row_max = largest
        acc = acc * shrink[:, None]
        if EDGE:
            # 0 * NaN is NaN: what is not finite is taken out, and put back for the rows that may see it
            x = v.to(tl.float32)
            stray = tl.abs(x) * 0.0 != 0.0
            acc = tl.dot(p.to(v.dtype), tl.where(stray, 0.0, x).to(v.dtype), acc, input_precision="ieee")
            if tl.max(tl.max(stray.to(tl.int32), 1), 0) != 0:
                seen = tl.broadcast_to(allowed, p.shape).to(tl.float16)
                plus = tl.dot(seen, (x == float("inf")).to(tl.float16))
                minus = tl.dot(seen, (x == float("-inf")).to(tl.float16))
                undefined = tl.dot(seen, (x != x).to(tl.float16))
                acc += tl.where(plus > 0, float("inf"), 0.0) + tl.where(minus > 0, float("-inf"), 0.0)
                acc += tl.where(undefined > 0, float("nan"), 0.0)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def _forward(Q, K, V, M, Y, LSE, stride_qb, stride_qh, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
             stride_vb, stride_vh, stride_vn, stride_vd, stride_mb, stride_mh, stride_mq, stride_mk,
             H, GROUP, S, T, D, DV, scale, inverse_cap, cap, offset, left, right,
             MASK: tl.constexpr, SOFTCAP: tl.constexpr, WRITE_LSE: tl.constexpr, TO_LOG2: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_DV: tl.constexpr):
    blocks = tl.cdiv(S, BLOCK_M)
    # the last blocks of a causal call have most to do: they start first
    i0 = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    head = tl.program_id(0) // blocks
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    kv = h // GROUP

    rows = i0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    far = rows.to(tl.int64)[:, None]
    q = tl.load(Q + b * stride_qb + h * stride_qh + far * stride_qm + d[None, :] * stride_qd,
                mask=(rows < S)[:, None] & (d < D)[None, :], other=0.0)
    k_base = K + b * stride_kb + kv * stride_kh
    v_base = V + b * stride_vb + kv * stride_vh
    m_base = M + b * stride_mb + h * stride_mh + far * stride_mq

    # the band of each row, and what follows for the block (op_impl/common/band.h)
    begin = tl.minimum(tl.maximum(rows + offset - left, 0), T)
    end = tl.minimum(tl.maximum(rows + offset + right + 1, 0), T)
    end = tl.where(rows < S, end, 0)
    last = tl.minimum(i0 + BLOCK_M, S) - 1
    lo = tl.minimum(tl.maximum(i0 + offset - left, 0), T) // BLOCK_N * BLOCK_N
    hi = tl.minimum(tl.maximum(last + offset + right + 1, 0), T)
    whole_lo = tl.cdiv(tl.minimum(tl.maximum(last + offset - left, 0), T), BLOCK_N) * BLOCK_N
    whole_hi = tl.minimum(tl.maximum(i0 + offset + right + 1, 0), T) // BLOCK_N * BLOCK_N
    if MASK != 0 or whole_hi < whole_lo:
        whole_lo = hi
        whole_hi = hi

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = _tiles(
        acc, row_max, row_sum, q, k_base, v_base, m_base, lo, whole_lo, begin, end, stride_kn, stride_kd, stride_vn,
        stride_vd, stride_mk, D, DV, scale, inverse_cap, cap, MASK, True, SOFTCAP, TO_LOG2, BLOCK_N, BLOCK_D,
        BLOCK_DV)
    if MASK == 0:
        acc, row_max, row_sum = _tiles(
            acc, row_max, row_sum, q, k_base, v_base, m_base, whole_lo, whole_hi, begin, end, stride_kn, stride_kd,
            stride_vn, stride_vd, stride_mk, D, DV, scale, inverse_cap, cap, MASK, False, SOFTCAP, TO_LOG2,
            BLOCK_N, BLOCK_D, BLOCK_DV)
        acc, row_max, row_sum = _tiles(
            acc, row_max, row_sum, q, k_base, v_base, m_base, whole_hi, hi, begin, end, stride_kn, stride_kd,
            stride_vn, stride_vd, stride_mk, D, DV, scale, inverse_cap, cap, MASK, True, SOFTCAP, TO_LOG2,
            BLOCK_N, BLOCK_D, BLOCK_DV)

    empty = row_sum == 0
    y = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, row_sum)[:, None])
    far = head.to(tl.int64) * S + rows
    tl.store(Y + far[:, None] * DV + dv[None, :], y.to(Y.dtype.element_ty),
             mask=(rows < S)[:, None] & (dv < DV)[None, :])
    if WRITE_LSE:
        lse = (row_max * TO_LOG2 + tl.log2(tl.where(empty, 1.0, row_sum))) / LOG2E
        tl.store(LSE + far, tl.where(empty, float("-inf"), lse), mask=rows < S)


def _check(q, k, v, attn_mask):
    """(B, H, G, S, T, D, DV) of a call, or an error in the words of the node."""
    def fail(kind, text):
        raise kind(f"For 'flash_attention', {text}.")

    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            fail(ValueError, f"the rank of '{name}' must be 4, but got the shape {tuple(x.shape)}")
        if x.dtype != q.dtype:
            fail(TypeError, f"'{name}' must have the dtype of 'q' {q.dtype}, but got {x.dtype}")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        fail(TypeError, f"the dtype of 'q' must be float32, float16 or bfloat16, but got {q.dtype}")
    (B, H, S, D), (G, T), DV = q.shape, k.shape[1:3], v.shape[3]
    if D < 1:
        fail(ValueError, "the head_dim of 'q' must be at least 1, but got 0")
    if tuple(k.shape) != (B, G, T, D):
        fail(ValueError, f"the shape of 'k' must be {(B, 'heads', 'length', D)}, but got {tuple(k.shape)}")
    if tuple(v.shape[:3]) != (B, G, T):
        fail(ValueError, f"the shape of 'v' must be {(B, G, T, 'channels')}, but got {tuple(v.shape)}")
    if H > 0 and (G < 1 or H % G):
        fail(ValueError, f"the heads of 'q' must be a multiple of those of 'k' {G}, but got {H}")
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and not attn_mask.dtype.is_floating_point:
            fail(TypeError, f"the dtype of 'attn_mask' must be bool (True = keep) or a float, but got "
                            f"{attn_mask.dtype}")
        full = (B, H, S, T)
        if attn_mask.ndim > 4 or any(a not in (1, b) for a, b in zip(reversed(attn_mask.shape), reversed(full))):
            fail(ValueError, f"the shape of 'attn_mask' {tuple(attn_mask.shape)} must broadcast to {full}")
    return B, H, G, S, T, D, DV


def _blocks(dtype, channels):
    """BLOCK_M, BLOCK_N, warps, stages: what fits the shared memory of an A100 at this many channels."""
    if dtype == torch.float32:
        return (64, 32, 4, 2) if channels <= 64 else (32, 32, 4, 1) if channels <= 256 else (16, 16, 4, 1)
    if channels <= 64:
        return 128, 64, 4, 3
    if channels <= 128:
        return 128, 64, 8, 3
    return (64, 32, 4, 2) if channels <= 256 else (32, 16, 4, 1)


def flash_attention(q, k, v, attn_mask=None, *, is_causal=False, scale=None, softcap=0.0, left_window_size=-1,
                    right_window_size=-1, causal_alignment=1, return_lse=False, blocks=None):
    """Attention as the node ``ai.msflash::FlashAttention`` defines it.

    Args:
        q (torch.Tensor): Queries (B, H, S, D); float32, float16 or bfloat16. Any strides, here and below.
        k (torch.Tensor): Keys (B, G, T, D). H % G == 0; query head h uses key head h // (H / G).
        v (torch.Tensor): Values (B, G, T, Dv).
        attn_mask (torch.Tensor): bool, True = keep, or float, added; broadcastable to (B, H, S, T). Default: ``None``.
        is_causal (bool): No key after the diagonal. Default: ``False``.
        scale (float): Factor of q k^T; ``None`` is D ** -0.5. Default: ``None``.
        softcap (float): Bound of the scaled scores; 0 is none. Default: ``0.0``.
        left_window_size (int): Keys before the diagonal; -1 is no limit. Default: ``-1``.
        right_window_size (int): Keys after the diagonal; -1 is no limit. Default: ``-1``.
        causal_alignment (int): The diagonal ends in the corner 1 bottom right, 0 top left. Default: ``1``.
        return_lse (bool): Return the log-sum-exp of each row too. Default: ``False``.
        blocks (tuple): (BLOCK_M, BLOCK_N, warps, stages) instead of the built-in choice. Default: ``None``.

    Returns:
        torch.Tensor (B, H, S, Dv), or the tuple of it and the LSE, float32 (B, H, S), -inf for a row without keys.

    Raises:
        TypeError: If a dtype is not supported.
        ValueError: If shapes do not fit together.
    """
    B, H, G, S, T, D, DV = _check(q, k, v, attn_mask)
    y = torch.empty((B, H, S, DV), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, S), dtype=torch.float32, device=q.device) if return_lse else None
    if attn_mask is None:
        kind, mask, mask_strides = 0, q, (0, 0, 0, 0)
    else:
        kind = 1 if attn_mask.dtype == torch.bool else 2
        mask = attn_mask.view(torch.uint8) if kind == 1 else attn_mask
        mask_strides = mask.expand(B, H, S, T).stride()
    # Scores in units of log2, so that exp2 needs no factor; in natural units under a float mask, whose lowest finite
    # numbers times log2(e) would be -inf.
    per_nat = 1.0 if kind == 2 else LOG2E.value
    scale = D ** -0.5 if scale is None else float(scale)
    channels = max(16, triton.next_power_of_2(D), triton.next_power_of_2(DV))
    block_m, block_n, warps, stages = blocks or _blocks(q.dtype, channels)
    right = 0 if is_causal else right_window_size
    if y.numel() or (lse is not None and lse.numel()):
        _forward[(triton.cdiv(S, block_m) * B * H,)](
            q, k, v, mask, y, lse, *q.stride(), *k.stride(), *v.stride(), *mask_strides, H, H // G, S, T, D, DV,
            scale * per_nat, scale / softcap if softcap else 0.0, softcap * per_nat,
            T - S if causal_alignment else 0, UNLIMITED if left_window_size < 0 else min(left_window_size, UNLIMITED),
            UNLIMITED if right < 0 else min(right, UNLIMITED),
            MASK=kind, SOFTCAP=softcap != 0, WRITE_LSE=return_lse, TO_LOG2=LOG2E.value / per_nat,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=max(16, triton.next_power_of_2(D)),
            BLOCK_DV=max(16, triton.next_power_of_2(DV)), num_warps=warps, num_stages=stages)
    return (y, lse) if return_lse else y
