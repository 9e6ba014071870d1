"""Cells over the functions."""

from __future__ import annotations

from mindspore import nn

# absolute: MindSpore's rewriting (AMP O1) may import this file as a module of its own
from ms_flash.functional import flash_attention
from ms_flash.multihead import MultiheadAttention
from ms_flash.paged import CacheFullError, PagedKVCache

__all__ = ["CacheFullError", "FlashAttention", "MultiheadAttention", "PagedKVCache"]


class FlashAttention(nn.Cell):
    """
    Attention as a Cell: :func:`ms_flash.flash_attention` with its static options fixed.

    Dropout is active while the Cell trains, as ``set_train`` says, and only then.

    Args:
        causal (bool, optional): Masks out every key behind the diagonal. Default: ``False``.
        softmax_scale (float, optional): Factor of query . key. Default: ``None``, which is head_dim ** -0.5.
        block_m (int, optional): Query rows per block. Default: ``None``, chosen by the backend.
        block_n (int, optional): Keys per block. Default: ``None``, chosen by the backend.
        precision_mode (str, optional): ``"default"`` or ``"high"``. Default: ``"default"``.
        dropout_p (float, optional): Probability of dropping an attention weight, in [0, 1). Default: ``0.0``.

    Keyword Args:
        window_size (tuple[int], optional): (left, right), numbers of keys; -1 is no limit. Default: ``(-1, -1)``.
        softcap (float, optional): Bound of the scaled scores; 0 is none. Default: ``0.0``.
        layout (str, optional): ``"BNSD"``, ``"BSND"``, ``"BSH"`` or ``"SBH"``. Default: ``"BNSD"``.
        causal_align (str, optional): ``"bottom_right"`` or ``"top_left"``. Default: ``"bottom_right"``.
        seed (int, optional): Of dropout, the same at every step. Default: ``None``, drawn anew at every step.
        return_lse (bool, optional): Whether to return the LSE as well. Default: ``False``.
        deterministic (bool, optional): Bit-equal results from run to run. Default: ``True``.
        backend (str, optional): As in :func:`ms_flash.flash_attention`. Default: ``None``.
        num_heads (int, optional): Heads of the query; needed for BSH, SBH and packed QKV. Default: ``None``.
        num_kv_heads (int, optional): Heads of key and value. Default: ``None``.

    Inputs:
        - **query** (Tensor) - Shape by `layout`, (B, N, Sq, D) for BNSD. float32, float16 or bfloat16. Packed QKV if
          `key` and `value` are ``None``.
        - **key** (Tensor, optional) - (B, Nk, Sk, D). Default: ``None``.
        - **value** (Tensor, optional) - (B, Nk, Sk, Dv). Default: ``None``.
        - **attn_mask** (Union[Tensor, tuple[int]], optional) - bool or uint8, True = masked out, broadcastable to
          (B, N, Sq, Sk); or (left, right), a window. Default: ``None``.
        - **bias** (Tensor, optional) - Added to the scaled scores, broadcastable likewise. Default: ``None``.
        - **alibi_slopes** (Tensor, optional) - float32, (N,) or (B, N). Default: ``None``.
        - **sinks** (Tensor, optional) - (N,). Default: ``None``.
        - **seed** (Union[int, Tensor], optional) - Of dropout, in the place of the Cell's. Default: ``None``.

    Outputs:
        Tensor, the output, in the layout of `query`; with `return_lse` a tuple of it and the LSE (B, N, Sq), float32.

    Raises:
        TypeError: If the type or dtype of an argument is wrong; raised when the Cell is called.
        ValueError: If a value or shape is wrong; raised when the Cell is called.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> import ms_flash
        >>> x = ms.Tensor(np.ones((2, 8, 128, 64)), ms.float16)
        >>> attention = ms_flash.nn.FlashAttention(causal=True)
        >>> print(attention(x, x, x).shape)
        (2, 8, 128, 64)
    """

    def __init__(self, causal=False, softmax_scale=None, block_m=None, block_n=None, precision_mode="default",
                 dropout_p=0.0, *, window_size=(-1, -1), softcap=0.0, layout="BNSD", causal_align="bottom_right",
                 seed=None, return_lse=False, deterministic=True, backend=None, num_heads=None, num_kv_heads=None):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.block_m = block_m
        self.block_n = block_n
        self.precision_mode = precision_mode
        self.dropout_p = dropout_p
        self.window_size = window_size
        self.softcap = softcap
        self.layout = layout
        self.causal_align = causal_align
        self.seed = seed
        self.return_lse = return_lse
        self.deterministic = deterministic
        self.backend = backend
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads

    def construct(self, query, key=None, value=None, attn_mask=None, bias=None, alibi_slopes=None, sinks=None,
                  seed=None):
        if seed is None:
            seed = self.seed
        return flash_attention(
            query, key, value, attn_mask, dropout_p=self.dropout_p, softmax_scale=self.softmax_scale,
            causal=self.causal, window_size=self.window_size, bias=bias, alibi_slopes=alibi_slopes,
            softcap=self.softcap, sinks=sinks, layout=self.layout, causal_align=self.causal_align, seed=seed,
            training=self.training, return_lse=self.return_lse, deterministic=self.deterministic,
            precision_mode=self.precision_mode, block_m=self.block_m, block_n=self.block_n, backend=self.backend,
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
