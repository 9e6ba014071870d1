"""flash_attention_score with the signature of mindspore.ops.flash_attention_score: porting is one import line."""

from __future__ import annotations

import math
import numbers
import weakref

import numpy as np
from mindspore import Tensor, ops
from mindspore.common import dtype as mstype

from .compile_time import CompileTime
from .functional import attention
from .spec import Arg, type_error, type_name, value_error

_NAME = "flash_attention_score"
_AXES = {"BSH": "BSH", "BNSD": "BNSD", "SBH": "SBH", "BSND": "BSND", "TND": "TND"}
_UNLIMITED = 2**31 - 1
_COMPRESSED = 2048      # side of the mask that stands for a triangle of any size
_PSE_ROWS = 1024        # rows of a real_shift that follows the ALiBi rule


def flash_attention_score(query, key, value, head_num, real_shift=None, drop_mask=None, padding_mask=None,
                          attn_mask=None, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, keep_prob=1.0,
                          scalar_value=1.0, pre_tokens=2147483647, next_tokens=2147483647, inner_precise=0,
                          input_layout='BSH', sparse_mode=0):
    r"""
    Attention with the signature and the semantics of :func:`mindspore.ops.flash_attention_score`, on every backend of
    this package, the CPU included.

    .. math::
        attention\_out = Dropout(Softmax(Mask(scalar\_value \cdot query \cdot key^T + real\_shift)),
        keep\_prob) \cdot value

    B is the batch size, S1 and S2 the lengths of query and key, N1 and N2 their numbers of heads (N1 is a multiple of
    N2), D the head_dim (any, not only multiples of 16), H1 = N1 * D and H2 = N2 * D. Limits on sizes that come from
    the Ascend kernel do not apply. A row that is masked out as a whole gives 0.

    Args:
        query (Tensor): (B, S1, H1), (B, N1, S1, D), (S1, B, H1), (B, S1, N1, D) or (T1, N1, D), as `input_layout`
            says. float16, bfloat16 or float32.
        key (Tensor): (B, S2, H2), (B, N2, S2, D), (S2, B, H2), (B, S2, N2, D) or (T2, N2, D). Dtype of `query`.
        value (Tensor): Shape and dtype of `key`.
        head_num (int): N1.
        real_shift (Tensor, optional): Added to the scaled scores (also known as pse); dtype of `query`,
            differentiable. (B, N1, S1, S2) or (1, N1, S1, S2). With `sparse_mode` 2 or 3 and S1 = S2 > 1024 also
            (B, N1, 1024, S2) or (1, N1, 1024, S2): the last 1024 rows of a matrix whose entries depend on j - i only
            (ALiBi); the rows above are rebuilt, which takes (1 or B, N1, S1, S2) in memory. It is added after the
            scaling, as the formula in MindSpore's docstring says; Ascend kernels that scale the sum instead,
            scale * (q.k + pse), are matched by passing ``real_shift * scalar_value``. Default: ``None``.
        drop_mask (Tensor, optional): uint8 (B, N1, S1, S2 // 8), one bit per probability, 1 = kept; key j is bit j % 8
            of byte j // 8, the lowest bit first (``numpy.packbits(..., bitorder="little")``). S2 is a multiple of 8.
            TND: (sum of S1 * S2 over the sequences * N1 // 8,), the bits of (N1, S1, S2) of each sequence in turn.
            Given exactly when `keep_prob` is less than 1; unpacked to a byte per probability. Default: ``None``.
        padding_mask (None): Reserved, must be ``None``. Default: ``None``.
        attn_mask (Tensor, optional): bool or uint8, True or 1 = masked out. (B, N1, S1, S2), (B, 1, S1, S2),
            (1, 1, S1, S2) or (S1, S2) with `sparse_mode` 0 and 1 (TND: (longest S1, longest S2), indexes inside a
            sequence), the first two with 5, and (2048, 2048), True above the diagonal, with 2, 3 and 4.
            Default: ``None``.
        prefix (Union[Tensor, tuple[int], list[int]], optional): For each batch entry, how many keys from the first
            one on are visible to all queries; (B,), each from max(0, S2 - S1) to S2. For `sparse_mode` 5 only.
            Default: ``None``.
        actual_seq_qlen (Union[Tensor, tuple[int], list[int]], optional): Where each sequence of `query` ends:
            cumulative lengths without a leading 0, the last one T1. For TND only. Default: ``None``.
        actual_seq_kvlen (Union[Tensor, tuple[int], list[int]], optional): The same for `key`, the last one T2.
            Default: ``None``.
        keep_prob (float, optional): Probability of keeping, in (0, 1]; what is kept is divided by it.
            Default: ``1.0``.
        scalar_value (float, optional): Factor of the scores; usually ``D ** -0.5``. Default: ``1.0``.
        pre_tokens (int, optional): How many keys before the diagonal are visible, for `sparse_mode` 0 with
            `attn_mask`, and 4; negative: the band starts that far after the diagonal. Takes no effect otherwise.
            Default: ``2147483647``.
        next_tokens (int, optional): How many keys after the diagonal are visible, likewise; negative: the band ends
            that far before the diagonal. Default: ``2147483647``. A negative one of the two costs a mask (S1, S2).
        inner_precise (int, optional): Reserved, takes no effect, as in MindSpore. Default: ``0``.
        input_layout (str, optional): "BSH", "BNSD", "SBH", "BSND" or "TND" (sequences end to end).
            Default: ``"BSH"``.
        sparse_mode (int, optional): Which keys a query sees. Default: ``0``.

            - 0: all, or with `attn_mask` those that it leaves, inside the band of `pre_tokens` and `next_tokens`
              around the diagonal through the upper left corner.
            - 1: those that the full `attn_mask` leaves. The band takes no effect.
            - 2: causal, the diagonal through the upper left corner. `attn_mask` is the (2048, 2048) triangle.
            - 3: causal, the diagonal through the lower right corner. `attn_mask` as for 2.
            - 4: the band around the diagonal through the lower right corner. `attn_mask` as for 2.
            - 5: as 3, and the first `prefix` keys; of these those that the full `attn_mask` leaves. Not with TND.
            - 6, 7, 8: not implemented, as in MindSpore.

            Without `attn_mask`, the modes 1 to 5 are an error: an Ascend device would compute full attention.
            The contents of a (2048, 2048) mask are checked in PyNative mode, once per Tensor; a graph cannot.

    Returns:
        Tensor, attention_out, shape and dtype of `query`.

    Raises:
        TypeError: If an argument has the wrong type, or a Tensor the wrong dtype.
        ValueError: If a shape or a value does not fit, or an argument is given in a mode that does not take it.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor
        >>> from mindspore.common import dtype as mstype
        >>> from ms_flash import flash_attention_score
        >>> query = Tensor(np.ones([2, 4, 64]), dtype=mstype.float16)
        >>> key = Tensor(np.ones([2, 4, 64]), dtype=mstype.float16)
        >>> value = Tensor(np.ones([2, 4, 64]), dtype=mstype.float16)
        >>> output = flash_attention_score(query, key, value, 4)
        >>> print(output.shape)
        (2, 4, 64)
    """
    plan = _plan(query, key, value, head_num, real_shift, drop_mask, padding_mask, attn_mask, prefix, actual_seq_qlen,
                 actual_seq_kvlen, keep_prob, scalar_value, pre_tokens, next_tokens, inner_precise, input_layout,
                 sparse_mode)
    kv_heads, align, window, mask_kind, distances, lengths, expand_pse, ends_q, ends_k, sequences = plan
    if mask_kind == "":
        attn_mask = None
    elif mask_kind == "band":
        attn_mask = _with_band(attn_mask if sparse_mode == 0 else None, distances, lengths)
    elif mask_kind == "prefix":
        attn_mask = _with_prefix(attn_mask, prefix, lengths)
    scale, dropout_p = scalar_value, 1.0 - keep_prob
    if input_layout == "TND" and sequences:
        return _one_by_one(query, key, value, real_shift, drop_mask, attn_mask, dropout_p, scale, window, align,
                           sequences)
    cu_q, cu_k = None, None
    if input_layout == "TND":
        cu_q, cu_k = _with_zero(actual_seq_qlen, ends_q), _with_zero(actual_seq_kvlen, ends_k)
    if expand_pse:
        real_shift = _expanded(real_shift, lengths[0])
    if drop_mask is not None:
        drop_mask = _unpacked(drop_mask).reshape(drop_mask.shape[:-1] + (8 * drop_mask.shape[-1],))
    return _attend(query, key, value, attn_mask, real_shift, drop_mask, cu_q, cu_k, dropout_p, scale, window,
                   input_layout, align, head_num, kv_heads)


def _attend(query, key, value, attn_mask, bias, drop_mask, cu_q, cu_k, dropout_p, scale, window, layout, align,
            num_heads, num_kv_heads):
    out, _ = attention(_NAME, query, key, value, attn_mask, bias, None, None, None, drop_mask, cu_q, cu_k, dropout_p,
                       scale, False, window, 0.0, layout, align, True, True, "default", None, None, None, num_heads,
                       num_kv_heads, None)
    return out


def _one_by_one(query, key, value, real_shift, drop_mask, attn_mask, dropout_p, scale, window, align, sequences):
    """TND with a real_shift or a drop_mask, which the packed op does not take: one call per sequence."""
    bits = None if drop_mask is None else _unpacked(drop_mask)
    outs = ()
    for b, q_start, q_end, k_start, k_end, bit in sequences:
        q_len, k_len = q_end - q_start, k_end - k_start
        bias, keep, mask = None, None, attn_mask
        if real_shift is not None:
            batch = b if real_shift.shape[0] > 1 else 0
            rows, longest = min(q_len, _PSE_ROWS), real_shift.shape[-1]
            bias = real_shift[batch:batch + 1, :, _PSE_ROWS - rows:, longest - k_len:]
            if q_len > rows:
                bias = _expanded(bias, q_len)
        if bits is not None:
            keep = bits[bit:bit + query.shape[1] * q_len * k_len].reshape((1, query.shape[1], q_len, k_len))
        if mask is not None:
            mask = mask[:q_len, :k_len]
        out = _attend(query[q_start:q_end].expand_dims(0), key[k_start:k_end].expand_dims(0),
                      value[k_start:k_end].expand_dims(0), mask, bias, keep, None, None, dropout_p, scale, window,
                      "BSND", align, None, None)
        outs = outs + (out.squeeze(0),)
    return ops.cat(outs, 0)


def _with_zero(ends, known):
    """Cumulative lengths with the leading 0 that the op expects."""
    if known is not None:
        return known
    return ops.cat((ops.zeros((1,), ends.dtype), ends), 0)


def _unpacked(bits):
    """uint8 of eight bits each -> uint8 of 0 or 1, in one axis."""
    keep = ops.bitwise_and(bits.reshape((-1, 1)), Tensor([1, 2, 4, 8, 16, 32, 64, 128], mstype.uint8))
    return (keep != 0).astype(mstype.uint8).reshape((-1,))


def _distance(lengths):
    """j - i for every query i and key j."""
    return ops.arange(lengths[1]).expand_dims(0) - ops.arange(lengths[0]).expand_dims(1)


def _with_band(attn_mask, distances, lengths):
    """Masks out what is not inside low <= j - i <= high, besides what attn_mask masks out."""
    distance = _distance(lengths)
    mask = ops.logical_or(distance < distances[0], distance > distances[1])
    if attn_mask is None:
        return mask
    return ops.logical_or(attn_mask.astype(mstype.bool_), mask)


def _with_prefix(attn_mask, prefix, lengths):
    """Masks out the keys after the diagonal that are not among the first ones, besides what attn_mask masks out."""
    if isinstance(prefix, (tuple, list)):
        prefix = Tensor(prefix, mstype.int64)
    hidden = _distance(lengths) > lengths[1] - lengths[0]
    beyond = ops.arange(lengths[1]) >= prefix.astype(mstype.int64).reshape((-1, 1, 1, 1))
    return ops.logical_or(attn_mask.astype(mstype.bool_), ops.logical_and(hidden, beyond))


def _expanded(pse, length):
    """The last rows of an ALiBi matrix -> all `length` rows. An entry depends on j - i only, so row i is the last row
    moved to the right by its distance from it; what would come from beyond its end lies above the diagonal."""
    columns = ops.clip(_distance((length - pse.shape[2], length)) + length - 1, 0, length - 1)
    above = ops.gather(pse[:, :, -1], columns, 2)
    return ops.cat((above, pse), 2)


class _Problem:
    """The arguments of one call, checked, and what follows from them for the op."""

    def __init__(self, query, key, value, head_num, layout):
        if not isinstance(layout, str):
            raise type_error(_NAME, f"the type of 'input_layout' must be str, but got {type_name(layout)}.")
        if layout not in _AXES:
            raise value_error(_NAME, f"'input_layout' must be one of {', '.join(map(repr, _AXES))}, but got "
                                     f"{layout!r}.")
        _check_int("head_num", head_num)
        if head_num < 1:
            raise value_error(_NAME, f"'head_num' must be 1 or greater, but got {head_num}.")
        axes = _AXES[layout]
        for name, x in (("query", query), ("key", key), ("value", value)):
            _check_tensor(name, x)
            if x.shape is None:
                raise value_error(_NAME, f"the rank of '{name}' must be known while the graph is compiled.")
            if len(x.shape) != len(axes):
                raise value_error(_NAME, f"the rank of '{name}' must be {len(axes)} (layout '{layout}'), but got "
                                         f"{len(x.shape)}, shape {x}.")
        if len(key.shape) != len(value.shape) or any(map(_differ, key.shape, value.shape)):
            raise value_error(_NAME, f"the shape of 'value' must be equal to that of 'key' {key}, but got {value}.")
        q, k = dict(zip(axes, query.shape)), dict(zip(axes, key.shape))
        self.layout, self.heads, self.dtype = layout, int(head_num), query.dtype
        self.batch, self.q_len, self.k_len = q.get("B", -1), q.get("S", q.get("T")), k.get("S", k.get("T"))
        self.kv_heads = self._kv_heads(query, key, q, k)

    def _kv_heads(self, query, key, q, k):
        heads = self.heads
        if "N" in q:
            if _differ(q["N"], heads):
                hint = f" Hint: {heads} is the length." if heads == self.q_len else ""
                raise value_error(_NAME, f"'head_num' must be equal to the number of heads of 'query' {q['N']} (layout "
                                         f"'{self.layout}'), but got {heads}: query {query}.{hint}")
            return None
        if q["H"] < 0 or k["H"] < 0:
            raise value_error(_NAME, "the hidden sizes of 'query' and 'key' must be known while the graph is "
                                     f"compiled, but got query {query}, key {key}.")
        if q["H"] % heads or q["H"] == 0:
            hint = f" Hint: {heads} is the length; 'head_num' is the number of attention heads." \
                if heads == self.q_len else ""
            raise value_error(_NAME, f"the hidden size of 'query' must be a multiple of 'head_num' {heads}, but got "
                                     f"{q['H']}.{hint}")
        head_dim = q["H"] // heads
        kv_heads = k["H"] // head_dim
        if k["H"] % head_dim or kv_heads == 0 or heads % kv_heads:
            raise value_error(_NAME, f"the hidden size of 'key' must be head_dim {head_dim} times a factor of "
                                     f"'head_num' {heads}, but got {k['H']}.")
        return kv_heads

    # -- which keys a query sees ---------------------------------------------------------------------------------------
    def masking(self, mode, attn_mask, prefix, pre, following):
        """(alignment, window, kind of mask, distances)"""
        for name, x in (("sparse_mode", mode), ("pre_tokens", pre), ("next_tokens", following)):
            _check_int(name, x)
        if mode in (6, 7, 8):
            raise value_error(_NAME, f"'sparse_mode' {mode} is not implemented; it must be in the range [0, 5].")
        if not 0 <= mode <= 5:
            raise value_error(_NAME, f"'sparse_mode' must be in the range [0, 5], but got {mode}.")
        if mode == 5 and self.layout == "TND":
            raise value_error(_NAME, "'sparse_mode' must not be 5 with 'input_layout' 'TND'.")
        self._check_mask(mode, attn_mask)
        self._check_prefix(mode, prefix)
        unlimited = (-1, -1)
        if mode == 0 and attn_mask is None:
            return "top_left", unlimited, "", ()
        if mode == 1:
            return "top_left", unlimited, "user", ()
        if mode == 5:
            self._need_lengths("'sparse_mode' 5")
            return "bottom_right", unlimited, "prefix", ()
        if mode in (2, 3):
            return "top_left" if mode == 2 else "bottom_right", (-1, 0), "", ()
        align, kind = ("top_left", "user") if mode == 0 else ("bottom_right", "")
        self._check_band(pre, following)
        if pre >= 0 and following >= 0:
            return align, tuple(-1 if x >= _UNLIMITED else int(x) for x in (pre, following)), kind, ()
        if self.layout == "TND":
            raise value_error(_NAME, "'pre_tokens' and 'next_tokens' must not be negative with 'input_layout' 'TND', "
                                     f"but got {pre} and {following}.")
        self._need_lengths("a negative 'pre_tokens' or 'next_tokens'")
        shift = 0 if mode == 0 else self.k_len - self.q_len
        return align, unlimited, "band", (int(shift - pre), int(shift + following))

    def _check_mask(self, mode, mask):
        if mask is None:
            if mode > 0:
                raise value_error(_NAME, f"'attn_mask' must be given with 'sparse_mode' {mode}, but got None. Hint: "
                                         "without it an Ascend device ignores the mode and computes full attention.")
            return
        _check_tensor("attn_mask", mask)
        if mask.dtype not in ("bool", "uint8"):
            hint = " Hint: a float mask is added to the scores: pass it as 'real_shift'." if "float" in mask.dtype \
                else ""
            raise type_error(_NAME, f"the dtype of 'attn_mask' must be bool or uint8, but got {mask.dtype}.{hint}")
        b, n, s1, s2 = self.batch, self.heads, self.q_len, self.k_len
        if mode in (2, 3, 4):
            shapes, why = [(_COMPRESSED, _COMPRESSED)], "the compressed mask"
        elif mode == 5:
            shapes, why = [(b, n, s1, s2), (b, 1, s1, s2)], "(B, N1, S1, S2) or (B, 1, S1, S2)"
        elif self.layout == "TND":
            shapes, why = [(-1, -1)], "(longest S1, longest S2)"
        else:
            shapes = [(b, n, s1, s2), (b, 1, s1, s2), (1, 1, s1, s2), (s1, s2)]
            why = "(B, N1, S1, S2), (B, 1, S1, S2), (1, 1, S1, S2) or (S1, S2)"
        _check_shape("attn_mask", mask, shapes, f"{why} with 'sparse_mode' {mode}")

    def _check_prefix(self, mode, prefix):
        if mode != 5:
            if prefix is not None:
                raise value_error(_NAME, f"'prefix' must be None with 'sparse_mode' {mode}; it belongs to 5.")
            return
        if prefix is None:
            raise value_error(_NAME, "'prefix' must be given with 'sparse_mode' 5, but got None.")
        if isinstance(prefix, Arg):
            _check_integer_tensor("prefix", prefix)
            _check_shape("prefix", prefix, [(self.batch,)], "(B,)")
            return
        _check_int_list("prefix", prefix)
        if _differ(len(prefix), self.batch):
            raise value_error(_NAME, f"'prefix' must hold one number per batch entry, {self.batch}, but got "
                                     f"{len(prefix)}.")
        if self.q_len >= 0 and self.k_len >= 0:
            low = max(0, self.k_len - self.q_len)
            if any(not low <= n <= self.k_len for n in prefix):
                raise value_error(_NAME, f"'prefix' must hold numbers in the range [{low}, {self.k_len}], but got "
                                         f"{tuple(prefix)}.")

    def _check_band(self, pre, following):
        s1, s2 = self.q_len, self.k_len
        empty = pre < 0 and following < 0
        if pre < 0 <= following:
            empty = following < -pre or 0 <= s2 <= -pre
        elif following < 0 <= pre:
            empty = -following > pre or 0 <= s1 <= -following
        if empty:
            raise value_error(_NAME, "the band of 'pre_tokens' and 'next_tokens' must not be empty, but got "
                                     f"{pre} and {following} for S1 {s1}, S2 {s2}.")

    def _need_lengths(self, what):
        if self.q_len < 0 or self.k_len < 0:
            raise value_error(_NAME, f"{what} needs lengths that are known while the graph is compiled.")

    # -- sequences end to end ------------------------------------------------------------------------------------------
    def ends(self, q_ends, k_ends, one_by_one):
        """(cumulative lengths of query, of key: Tensors or ``None``; sequences for separate calls)"""
        given = (("actual_seq_qlen", q_ends, self.q_len), ("actual_seq_kvlen", k_ends, self.k_len))
        if self.layout != "TND":
            for name, x, _ in given:
                if x is not None:
                    raise value_error(_NAME, f"'{name}' must be None with 'input_layout' '{self.layout}'; it belongs "
                                             "to 'TND'.")
            return None, None, ()
        for name, x, total in given:
            if x is None:
                raise value_error(_NAME, f"'{name}' must be given with 'input_layout' 'TND', but got None.")
            self._check_ends(name, x, total)
        sizes = [x.shape[0] if isinstance(x, Arg) and x.shape else -1 if isinstance(x, Arg) else len(x)
                 for _, x, _ in given]
        if _differ(*sizes):
            raise value_error(_NAME, "'actual_seq_kvlen' must hold as many numbers as 'actual_seq_qlen' "
                                     f"{sizes[0]}, but got {sizes[1]}.")
        if not one_by_one:
            return _cumulative(q_ends), _cumulative(k_ends), ()
        if isinstance(q_ends, Arg) or isinstance(k_ends, Arg):
            raise value_error(_NAME, "'actual_seq_qlen' and 'actual_seq_kvlen' must be tuples of constants in a graph "
                                     "with 'real_shift' or 'drop_mask', but got a Tensor.")
        sequences, q_start, k_start, bit = [], 0, 0, 0
        for b, (q_end, k_end) in enumerate(zip(q_ends, k_ends)):
            sequences.append((b, q_start, int(q_end), k_start, int(k_end), bit))
            bit += self.heads * (q_end - q_start) * (k_end - k_start)
            q_start, k_start = int(q_end), int(k_end)
        return None, None, tuple(sequences)

    @staticmethod
    def _check_ends(name, ends, total):
        if isinstance(ends, Arg):
            _check_integer_tensor(name, ends)
            if ends.shape is not None and len(ends.shape) != 1:
                raise value_error(_NAME, f"the shape of '{name}' must be (batch,), but got {ends}.")
            return
        _check_int_list(name, ends)
        if not ends:
            raise value_error(_NAME, f"'{name}' must hold one number per sequence, but got none.")
        if any(b < a for a, b in zip((0,) + tuple(ends), ends)):
            raise value_error(_NAME, f"'{name}' must hold cumulative lengths that do not decrease, but got "
                                     f"{tuple(ends)}.")
        if _differ(ends[-1], total):
            tensor = "query" if name == "actual_seq_qlen" else "key"
            raise value_error(_NAME, f"the last number of '{name}' must be equal to the first axis of '{tensor}' "
                                     f"{total}, but got {ends[-1]}.")

    # -- what is added and what is dropped -----------------------------------------------------------------------------
    def check_pse(self, pse, mode, sequences):
        """Whether `pse` holds the last rows only."""
        if pse is None:
            return False
        _check_tensor("real_shift", pse)
        if pse.dtype != self.dtype:
            raise type_error(_NAME, f"the dtype of 'real_shift' must be equal to that of 'query' {self.dtype}, but got "
                                    f"{pse.dtype}.")
        b, n, s1, s2 = self.batch, self.heads, self.q_len, self.k_len
        if self.layout == "TND":
            q_lens = [s[2] - s[1] for s in sequences]
            k_lens = [s[4] - s[3] for s in sequences]
            if q_lens != k_lens or max(q_lens) <= _PSE_ROWS or mode not in (2, 3):
                raise value_error(_NAME, "with 'real_shift', 'input_layout' 'TND' needs 'sparse_mode' 2 or 3, queries "
                                         "and keys of equal lengths and a sequence longer than 1024, but got "
                                         f"'sparse_mode' {mode}, lengths {q_lens} and {k_lens}.")
            longest = max(k_lens)
            _check_shape("real_shift", pse, [(len(q_lens), n, _PSE_ROWS, longest), (1, n, _PSE_ROWS, longest)],
                         "(B or 1, N1, 1024, longest S2)")
            return False
        shapes, meaning = [(b, n, s1, s2), (1, n, s1, s2)], "(B or 1, N1, S1, S2)"
        compressible = s1 == s2 and s1 > _PSE_ROWS and mode in (2, 3)
        if compressible:
            shapes += [(b, n, _PSE_ROWS, s2), (1, n, _PSE_ROWS, s2)]
            meaning += " or (B or 1, N1, 1024, S2)"
        _check_shape("real_shift", pse, shapes, meaning)
        return compressible and pse.shape is not None and pse.shape[2] == _PSE_ROWS

    def check_dropout(self, keep_prob, drop_mask, sequences):
        _check_float("keep_prob", keep_prob)
        if not 0 < keep_prob <= 1:
            raise value_error(_NAME, f"'keep_prob' must be in the range (0, 1], but got {keep_prob}.")
        if drop_mask is None:
            if keep_prob < 1:
                raise value_error(_NAME, f"'drop_mask' must be given with 'keep_prob' {keep_prob}, but got None.")
            return
        if keep_prob == 1:
            raise value_error(_NAME, "'drop_mask' must be None with 'keep_prob' 1.0.")
        _check_tensor("drop_mask", drop_mask)
        if drop_mask.dtype != "uint8":
            raise type_error(_NAME, f"the dtype of 'drop_mask' must be uint8, but got {drop_mask.dtype}.")
        b, n, s1, s2 = self.batch, self.heads, self.q_len, self.k_len
        if self.layout == "TND":
            bits = n * sum((s[2] - s[1]) * (s[4] - s[3]) for s in sequences)
            if bits % 8:
                raise value_error(_NAME, "the number of probabilities must be a multiple of 8 with 'drop_mask', but "
                                         f"got {bits}.")
            _check_shape("drop_mask", drop_mask, [(bits // 8,)], "(sum of S1 * S2 * N1 // 8,)")
            return
        if s2 > 0 and s2 % 8:
            raise value_error(_NAME, f"the length of 'key' must be a multiple of 8 with 'drop_mask', but got {s2}.")
        _check_shape("drop_mask", drop_mask, [(b, n, s1, s2 // 8 if s2 >= 0 else -1)], "(B, N1, S1, S2 // 8)")


def _checked(query, key, value, head_num, real_shift, drop_mask, padding_mask, attn_mask, prefix, q_ends, k_ends,
             keep_prob, scalar_value, pre_tokens, next_tokens, inner_precise, layout, mode):
    """Checks one call.

    Returns:
        tuple (kv_heads, alignment, window, kind of mask, (low, high) of a band mask, (S1, S2), whether real_shift
        holds the last rows only, cumulative lengths of query, of key, sequences for separate calls).
    """
    if padding_mask is not None:
        raise value_error(_NAME, "'padding_mask' is reserved and must be None.")
    _check_float("scalar_value", scalar_value)
    _check_int("inner_precise", inner_precise)
    problem = _Problem(query, key, value, head_num, layout)
    align, window, kind, distances = problem.masking(mode, attn_mask, prefix, pre_tokens, next_tokens)
    cu_q, cu_k, sequences = problem.ends(q_ends, k_ends, real_shift is not None or drop_mask is not None)
    expand = problem.check_pse(real_shift, mode, sequences)
    problem.check_dropout(keep_prob, drop_mask, sequences)
    return (problem.kv_heads, align, window, kind, distances, (problem.q_len, problem.k_len), expand, cu_q, cu_k,
            sequences)


class _Plan(CompileTime):
    """In PyNative, where values are at hand, these are checked too."""

    def __call__(self, *args):
        args = list(args)
        for index in (_PREFIX, _ENDS_Q, _ENDS_K):
            x = args[index]
            if isinstance(x, Tensor) and x.ndim == 1 and x.dtype in (mstype.int32, mstype.int64):
                args[index] = tuple(x.asnumpy().tolist())
        plan = super().__call__(*args)
        if args[_MODE] in (2, 3, 4):
            _check_triangle(args[_ATTN_MASK])
        return plan


_ATTN_MASK, _PREFIX, _ENDS_Q, _ENDS_K, _MODE = 7, 8, 9, 10, 17      # positions among the arguments
_triangles = weakref.WeakValueDictionary()                          # masks that were found right


def _check_triangle(mask):
    if _triangles.get(id(mask)) is mask:
        return
    if not np.array_equal(mask.asnumpy() != 0, np.triu(np.ones((_COMPRESSED, _COMPRESSED), bool), 1)):
        raise value_error(_NAME, "the compressed 'attn_mask' must be True above the diagonal and False elsewhere, "
                                 "numpy.triu(numpy.ones((2048, 2048)), k=1). Hint: a full mask goes with "
                                 "'sparse_mode' 0 or 1.")
    _triangles[id(mask)] = mask


def _cumulative(ends):
    return None if isinstance(ends, Arg) else Tensor((0,) + tuple(ends), mstype.int64)


def _differ(a, b):
    return a != b and a >= 0 and b >= 0


def _check_tensor(name, x):
    if not isinstance(x, Arg):
        raise type_error(_NAME, f"the type of '{name}' must be Tensor, but got {type_name(x)}.")


def _check_shape(name, x, shapes, meaning):
    if x.shape is None or any(len(x.shape) == len(s) and not any(map(_differ, x.shape, s)) for s in shapes):
        return
    expected = " or ".join(dict.fromkeys(str(Arg(s, "")) for s in shapes))
    raise value_error(_NAME, f"the shape of '{name}' must be {meaning} = {expected}, but got {x}.")


def _check_int(name, x):
    if isinstance(x, bool) or not isinstance(x, numbers.Integral):
        raise type_error(_NAME, f"the type of '{name}' must be int, but got {type_name(x)}.")


def _check_float(name, x):
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise type_error(_NAME, f"the type of '{name}' must be float, but got {type_name(x)}.")
    if not math.isfinite(x):
        raise value_error(_NAME, f"'{name}' must be finite, but got {x}.")


def _check_int_list(name, x):
    if not isinstance(x, (tuple, list)):
        raise type_error(_NAME, f"the type of '{name}' must be Tensor, tuple[int] or list[int], but got "
                                f"{type_name(x)}.")
    for n in x:
        if isinstance(n, bool) or not isinstance(n, numbers.Integral):
            raise type_error(_NAME, f"'{name}' must hold ints, but got {type_name(n)}.")


def _check_integer_tensor(name, x):
    if x.dtype not in ("int32", "int64"):
        raise type_error(_NAME, f"the dtype of '{name}' must be int32 or int64, but got {x.dtype}.")


_plan = _Plan("MsFlashScoreCheck", _checked)
