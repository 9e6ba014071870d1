"""Attention: the op of ms_flash, and MindSpore's FlashAttentionScore, in the terms of the node."""

from __future__ import annotations

from ms_flash import op_table

from ..builder import Tensor, Unsupported
from ..profiles import Attention
from . import register
from .arithmetic import binary
from .index import where
from .shape import permute, reshape, split, unsqueeze
from .structure import Unavailable

# The node reads a scale of 0 as the default; with this one all weights are equal.
SMALLEST_SCALE = 1.1754943508222875e-38


def parse(text):
    """The attribute `spec` of the op of ms_flash as a dict."""
    return dict(item.split("=", 1) for item in text.split(";"))


@register("Custom")
def custom(b, node, *inputs):
    name = str(node.attrs.get("reg_op_name") or node.attrs.get("func_name", "Custom"))
    if name not in _OPS or "spec" not in node.attrs:
        raise Unsupported(f"the custom operator '{name.rsplit('/', 1)[-1]}': there is no rule for it")
    return _OPS[name](b, node.attrs["spec"], *inputs)


def _forward(b, text, *inputs):
    out, lse = attend(b, parse(text), **dict(zip(op_table.input_names(), inputs)))
    return out, lse, Unavailable("the row maximum"), Unavailable("the row sum")


def _with_cache(b, text, *inputs):
    raise Unsupported("flash_attention_with_kvcache keeps keys and values from run to run, and a model keeps nothing: "
                      "make past keys and values inputs and outputs of the net, as samples/gpt_export_generate.py does")


def _merge(b, text, outs, lses):
    """Parts of the keys side by side: the share of each is its part of the common denominator."""
    zero, minus_inf, first = b.constant(0.0, "float32"), b.constant(float("-inf"), "float32"), b.constant([0], "int64")
    top = b.op("ReduceMax", lses, first, keepdims=1, shape=(1, *lses.shape[1:]))
    # where no part has a key exp(-inf - 0) is 0, but -inf - -inf would be NaN
    top = b.op("Where", b.op("Equal", top, minus_inf, dtype="bool"), zero, top, dtype="float32", shape=top.shape)
    terms = b.op("Exp", b.op("Sub", lses, top))
    total = b.op("ReduceSum", terms, first, keepdims=1, shape=top.shape)
    lse = b.op("Squeeze", b.op("Add", top, b.op("Log", total)), first, shape=lses.shape[1:])
    # with a key the total is 1 or more: its largest term is exp(0)
    shares = b.op("Div", terms, b.op("Max", total, b.constant(1.0, "float32")), shape=lses.shape)
    none = b.op("Equal", lses, minus_inf, dtype="bool")     # whatever a part without a key holds counts for nothing
    bsnd = parse(text)["layout"] == "BSND"
    shares, none = (unsqueeze(b, permute(b, x, (0, 1, 3, 2)) if bsnd else x, [4]) for x in (shares, none))
    parts = b.op("Where", none, zero, b.cast(outs, "float32"), dtype="float32", shape=outs.shape)
    out = b.op("ReduceSum", b.op("Mul", parts, shares), first, keepdims=0, shape=outs.shape[1:])
    return b.cast(out, outs.dtype), lse


_OPS = {"MsFlashFwd": _forward, "MsFlashMerge": _merge, "MsFlashKvCache": _with_cache}


def attend(b, spec, query, key, value, attn_mask=None, bias=None, alibi_slopes=None, sinks=None, seed=None,
           drop_mask=None, cu_seqlens_q=None, cu_seqlens_k=None):
    """Writes one request of ms_flash; returns (output in the layout of the query, LSE)."""
    if float.fromhex(spec["dropout"]) or drop_mask is not None:
        raise Unsupported("dropout is active: give the call training=self.training or dropout_p=0.0")
    layout, heads, kv_heads = spec["layout"], int(spec["heads"]), int(spec["kv_heads"])
    query, key, value = _unpacked(b, spec, query, key, value)
    q, k, v = (heads_first(b, x, layout, n) for x, n in ((query, heads), (key, kv_heads), (value, kv_heads)))
    left, right, align = int(spec["left"]), int(spec["right"]), int(spec["align"] == "bottom_right")
    scale = 0.0 if spec["scale"] == "default" else float.fromhex(spec["scale"]) or SMALLEST_SCALE
    masked = None if attn_mask is None else b.tensor(attn_mask, "bool")
    if layout == "TND":
        masked = _sequences(b, q, k, masked, cu_seqlens_q, cu_seqlens_k, left, right, align)
        if alibi_slopes is not None:
            raise Unsupported("alibi_slopes with variable lengths")
        left = right = -1
    if alibi_slopes is not None:
        bias = _with_alibi(b, bias, alibi_slopes, q, k, align)
    fill = None
    if "fill" in spec and masked is not None:
        fill, masked = (masked, float.fromhex(spec["fill"])), None
    mask = _mask(b, masked, bias)
    call = Attention(q, k, v, mask, {
        "is_causal": int(right == 0), "scale": scale, "softcap": float.fromhex(spec["softcap"]),
        "left_window_size": left, "right_window_size": right if right > 0 else -1, "causal_alignment": align}, fill)
    out, lse = b.profile.attend(b, call)
    if sinks is not None:
        out, lse = _with_sinks(b, out, lse, sinks)
    if layout == "TND":
        lse = reshape(b, lse, [q.shape[1], -1])
    return heads_back(b, out, layout, query), lse


def _unpacked(b, spec, query, key, value):
    if key is not None:
        return query, key, value
    heads, kv_heads, layout = int(spec["heads"]), int(spec["kv_heads"]), spec["layout"]
    if query.rank == 5:         # (B, S, 3, N, D)
        parts = split(b, query, 2, [1, 1, 1])
        return tuple(b.op("Squeeze", p, b.constant([2], "int64"), shape=query.shape[:2] + query.shape[3:])
                     for p in parts)
    axis = {"BNSD": 1, "BSND": 2, "BSH": 2, "SBH": 2}[layout]
    unit = query.shape[axis] // (heads + 2 * kv_heads)
    return split(b, query, axis, [heads * unit, kv_heads * unit, kv_heads * unit])


def heads_first(b, x, layout, heads):
    """(B, N, S, D) from any layout."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return permute(b, x, (0, 2, 1, 3))
    if layout == "TND":
        return unsqueeze(b, permute(b, x, (1, 0, 2)), [0])
    x = reshape(b, x, [b.length(x, 0), b.length(x, 1), heads, x.shape[2] // heads])
    return permute(b, x, (0, 2, 1, 3) if layout == "BSH" else (1, 2, 0, 3))


def heads_back(b, x, layout, query):
    """From (B, N, S, D) into the layout of the query."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return permute(b, x, (0, 2, 1, 3))
    if layout == "TND":
        one = b.op("Squeeze", x, b.constant([0], "int64"), shape=x.shape[1:])
        return permute(b, one, (1, 0, 2))
    x = permute(b, x, (0, 2, 1, 3) if layout == "BSH" else (2, 0, 1, 3))
    hidden = x.shape[2] * x.shape[3]
    return reshape(b, x, [b.length(query, 0), b.length(query, 1), hidden], (*query.shape[:2], hidden))


def _mask(b, masked, bias):
    """The mask of the node: bool True = keep, or float."""
    if masked is None:
        return bias
    if bias is None:
        return b.op("Not", masked)
    return where(b, masked, b.constant(float("-inf"), bias.dtype), bias)


def _distance(b, q, k):
    """int64 (Sq, Sk): key - query."""
    steps = b.constant(0, "int64"), b.constant(1, "int64")
    ranges = [b.op("Range", steps[0], b.tensor(b.length(x, 2), "int64"), steps[1], dtype="int64", shape=(x.shape[2],))
              for x in (q, k)]
    return binary(b, "Sub", unsqueeze(b, ranges[1], [0]), unsqueeze(b, ranges[0], [1]))


def _with_alibi(b, bias, slopes, q, k, align):
    distance = _distance(b, q, k)
    if align:
        shift = b.op("Sub", b.tensor(b.length(k, 2), "int64"), b.tensor(b.length(q, 2), "int64"))
        distance = b.op("Sub", distance, shift)
    distance = b.cast(b.op("Abs", distance), "float32")
    slopes = reshape(b, b.cast(slopes, "float32"), [1, -1, 1, 1] if slopes.rank == 1 else [0, -1, 1, 1],
                     (1 if slopes.rank == 1 else slopes.shape[0], q.shape[1], 1, 1))
    penalty = b.op("Neg", binary(b, "Mul", slopes, distance))
    return penalty if bias is None else binary(b, "Add", b.cast(bias, "float32"), penalty)


def _with_sinks(b, out, lse, sinks):
    """A logit without a value in the softmax: the output shrinks by exp(lse) / (exp(lse) + exp(sink))."""
    sink = reshape(b, b.cast(sinks, "float32"), [-1, 1], (sinks.shape[0], 1))
    top = b.op("Max", lse, sink, shape=lse.shape)
    parts = [b.op("Exp", b.op("Sub", x, top, shape=lse.shape)) for x in (lse, sink)]
    total = b.op("Add", *parts)
    share = unsqueeze(b, b.op("Div", parts[0], total), [3])
    scaled = b.cast(b.op("Mul", b.cast(out, "float32"), share), out.dtype)
    return scaled, b.op("Add", top, b.op("Log", total))


def _sequences(b, q, k, masked, cu_q, cu_k, left, right, align):
    """bool (T, Tk), True = masked out: other sequences, and what the band of each leaves out."""
    places, starts, ends = [], [], []
    for x, cu in ((q, cu_q), (k, cu_k)):
        cu = b.cast(b.tensor(cu), "int64")
        row = b.op("Range", b.constant(0, "int64"), b.tensor(b.length(x, 2), "int64"), b.constant(1, "int64"),
                   dtype="int64", shape=(x.shape[2],))
        after = b.op("GreaterOrEqual", unsqueeze(b, row, [1]), unsqueeze(b, cu, [0]), dtype="bool", shape=(-1, -1))
        number = b.op("Sub", b.op("ReduceSum", b.cast(after, "int64"), b.constant([1], "int64"), keepdims=0,
                                  shape=row.shape), b.constant(1, "int64"))
        last = b.op("Max", b.op("Sub", b.op("Shape", cu, dtype="int64", shape=(1,)), b.constant([2], "int64")),
                    b.constant([0], "int64"))
        inside = b.op("Min", number, last, shape=row.shape)
        places.append((row, number))
        starts.append(b.op("Gather", cu, inside, axis=0, shape=row.shape))
        following = b.op("Add", inside, b.constant(1, "int64"))
        ends.append(b.op("Gather", cu, following, axis=0, shape=row.shape))
    (row_q, number_q), (row_k, number_k) = places
    beyond = [b.op("GreaterOrEqual", row, end, dtype="bool") for (row, _), end in zip(places, ends)]
    column, line = (lambda x: unsqueeze(b, x, [1])), (lambda x: unsqueeze(b, x, [0]))
    other = b.op("Not", binary(b, "Equal", column(number_q), line(number_k), "bool"))
    other = binary(b, "Or", other, column(beyond[0]))
    other = binary(b, "Or", other, line(beyond[1]))
    local_q, local_k = b.op("Sub", row_q, starts[0]), b.op("Sub", row_k, starts[1])
    if left >= 0 or right >= 0:
        distance = binary(b, "Sub", line(local_k), column(local_q))
        if align:
            lengths = [b.op("Sub", end, start) for end, start in zip(ends, starts)]
            # keys of another sequence are masked out anyway, so the length of the key's own sequence serves
            distance = b.op("Sub", distance, binary(b, "Sub", line(lengths[1]), column(lengths[0])))
        if left >= 0:
            other = b.op("Or", other, b.op("Less", distance, b.constant(-left, "int64"), dtype="bool"))
        if right >= 0:
            other = b.op("Or", other, b.op("Greater", distance, b.constant(right, "int64"), dtype="bool"))
    if masked is not None:      # (longest, longest), indexes inside a sequence
        local = [b.op("Min", x, b.constant(masked.shape[i] - 1, "int64")) if masked.shape[i] > 0 else x
                 for i, x in enumerate((local_q, local_k))]
        picked = b.op("Gather", b.op("Gather", masked, local[0], axis=0, shape=(-1, masked.shape[1])), local[1], axis=1,
                      shape=other.shape)
        other = b.op("Or", other, picked)
    return other


@register("FlashAttentionScore")
def flash_attention_score(b, node, query, key, value, real_shift=None, drop_mask=None, padding_mask=None,
                          attn_mask=None, prefix=None, ends_q=None, ends_k=None, head_num=1, keep_prob=1.0, scale=1.0,
                          pre_tokens=2**31 - 1, next_tokens=2**31 - 1, inner_precise=0, input_layout="BSH",
                          sparse_mode=0):
    layout = {0: "BSH", 1: "BNSD", 2: "SBH", 3: "BSND", 4: "TND"}.get(input_layout, input_layout)
    if keep_prob != 1.0 or drop_mask is not None:
        raise Unsupported("dropout is active: give keep_prob=1.0 in evaluation mode")
    if layout == "TND" and real_shift is not None:
        raise Unsupported("real_shift with variable lengths")
    if sparse_mode not in (0, 1, 2, 3, 4):
        raise Unsupported(f"sparse_mode {sparse_mode}")
    left, right, align = -1, -1, "bottom_right"
    if sparse_mode in (2, 3):
        right, align = 0, "bottom_right" if sparse_mode == 3 else "top_left"
    elif sparse_mode == 4 or (sparse_mode == 0 and attn_mask is not None):
        if pre_tokens < 0 or next_tokens < 0:
            raise Unsupported(f"pre_tokens {pre_tokens} and next_tokens {next_tokens}")
        left, right = (-1 if n >= 2**31 - 1 else n for n in (pre_tokens, next_tokens))
        align = "bottom_right" if sparse_mode == 4 else "top_left"
    if sparse_mode in (2, 3, 4):
        if attn_mask is None:
            raise Unsupported(f"sparse_mode {sparse_mode} without attn_mask, where a device computes full attention")
        attn_mask = None
    if real_shift is not None and real_shift.shape[2] not in (-1, 1) and real_shift.shape[2] != _length(query, layout):
        raise Unsupported("a compressed real_shift")
    kv_heads = head_num
    if layout in ("BSH", "SBH"):
        kv_heads = key.shape[2] * head_num // query.shape[2]
    if layout == "TND":
        ends_q, ends_k = (_with_zero(b, ends) for ends in (ends_q, ends_k))
    spec = {"layout": layout, "heads": head_num, "kv_heads": kv_heads, "packed": "0", "scale": float(scale).hex(),
            "left": left, "right": right, "align": align, "softcap": 0.0.hex(), "dropout": 0.0.hex()}
    out, _ = attend(b, spec, query, key, value, attn_mask, real_shift, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    lost = Unavailable("the statistics of FlashAttentionScore")
    if isinstance(node.type, tuple) and not hasattr(node.type, "dtype"):
        # softmax_max, softmax_sum, softmax_out, attention_out
        return (lost,) * (len(node.type) - 1) + (out,)
    return out


def _length(x, layout):
    return x.shape[{"BNSD": 2, "BSND": 1, "BSH": 1, "SBH": 0, "TND": 0}[layout]]


def _with_zero(b, ends):
    ends = b.cast(b.tensor(ends), "int64") if isinstance(ends, Tensor) else b.vector(tuple(ends))
    return b.op("Concat", b.constant([0], "int64"), ends, axis=0, shape=(-1,))

