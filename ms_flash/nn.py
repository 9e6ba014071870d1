"""Cells over the functions."""

from __future__ import annotations

from mindspore import nn

from .functional import flash_attention


class FlashAttention(nn.Cell):
    """Attention as a Cell."""

    def __init__(self, causal=False, softmax_scale=None, block_m=None, block_n=None, precision_mode="default",
                 dropout_p=0.0, window_size=(-1, -1), softcap=0.0, layout="BNSD", causal_align="bottom_right",
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
