"""Matrix products and convolutions."""

from __future__ import annotations

from ..builder import Unsupported
from . import register
from .arithmetic import binary
from .shape import permute, reshape, unsqueeze


def _swap_last(b, x):
    return permute(b, x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])


def matmul(b, x, y, transpose_x=False, transpose_y=False, shape=None):
    """x @ y; of two matrices with a transposed one it is a Gemm, which reads that in place."""
    if x.rank == y.rank == 2 and (transpose_x or transpose_y):
        return b.op("Gemm", x, y, transA=int(transpose_x), transB=int(transpose_y), shape=shape, name="MatMul")
    x = _swap_last(b, x) if transpose_x else x
    y = _swap_last(b, y) if transpose_y else y
    return b.op("MatMul", x, y, shape=shape)


@register("MatMul", "BatchMatMul", "MatMulV2", "BatchMatMulV2")
def matmul_rule(b, node, x, y, transpose_x=False, transpose_y=False, *rest):
    return matmul(b, x, y, bool(transpose_x), bool(transpose_y), node.type.shape)


@register("MatMulExt", "BatchMatMulExt", "Mm", "Mv", "Dot")
def matmul_ext(b, node, x, y):
    return b.op("MatMul", x, y, shape=node.type.shape)


@register("Dense", "Linear", "LinearExt")
def dense(b, node, x, weight, bias=None):
    out = matmul(b, x, weight, False, True, node.type.shape)
    return out if bias is None else binary(b, "Add", out, bias)


@register("Addmm", "Baddbmm", "Addbmm")
def add_product(b, node, x, first, second, beta=1, alpha=1):
    if node.op == "Addbmm":
        raise Unsupported("a sum of products over the batch")
    product = b.op("MatMul", first, second, shape=node.type.shape)
    if alpha != 1:
        product = binary(b, "Mul", product, b.tensor(alpha, product.dtype))
    if beta == 0:
        return product
    if beta != 1:
        x = binary(b, "Mul", x, b.tensor(beta, x.dtype))
    return binary(b, "Add", x, product)


@register("Outer", "Ger")
def outer(b, node, x, y):
    return binary(b, "Mul", unsqueeze(b, x, [1]), unsqueeze(b, y, [0]))


@register("Einsum")
def einsum(b, node, tensors, *rest):
    equation = node.attrs.get("equation")
    return b.op("Einsum", *tensors, equation=equation, shape=node.type.shape)


@register("EinsumExt")
def einsum_ext(b, node, equation, tensors):
    return b.op("Einsum", *tensors, equation=equation, shape=node.type.shape)


def _ints(value, count):
    values = [int(v) for v in (value if isinstance(value, (tuple, list)) else (value,))]
    return values * count if len(values) == 1 else values[-count:]


@register("Conv2D", "Conv3D")
def convolution(b, node, x, weight):
    attrs = node.attrs
    count = weight.rank - 2
    if attrs.get("format", attrs.get("data_format", "NCHW")) not in ("NCHW", "NCDHW", 0):
        raise Unsupported(f"data_format '{attrs.get('format')}'")
    mode = attrs["pad_mode"].lower() if isinstance(attrs["pad_mode"], str) else {0: "pad", 1: "same", 2: "valid"}[
        attrs["pad_mode"]]
    pads, auto = None, None
    if mode == "pad":
        flat = _ints(attrs["pad"], 2 * count)
        pads = flat[0::2] + flat[1::2]
    else:
        auto = {"same": "SAME_UPPER", "valid": "VALID"}[mode]
    if auto == "VALID":
        pads, auto = [0] * (2 * count), None
    return b.op("Conv", x, weight, strides=_ints(attrs["stride"], count), dilations=_ints(attrs["dilation"], count),
                group=int(attrs.get("group", 1)), pads=pads, auto_pad=auto, kernel_shape=list(weight.shape[2:]),
                shape=node.type.shape)


@register("Conv1DExt", "Conv2DExt", "Conv3DExt", "Conv1DPadding", "Conv2DPadding", "Conv3DPadding")
def convolution_ext(b, node, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    count = weight.rank - 2
    unbatched = x.rank == count + 1
    x = unsqueeze(b, x, [0]) if unbatched else x
    pads, auto = None, None
    if isinstance(padding, str) or node.op.endswith("Padding"):
        kind = padding if isinstance(padding, str) else {1: "same", 2: "valid"}.get(padding, "valid")
        if kind == "valid":
            pads = [0] * (2 * count)
        else:
            auto = "SAME_UPPER"
    else:
        pads = _ints(padding, count) * 2
    shape = (1, *node.type.shape) if unbatched else node.type.shape
    out = b.op("Conv", x, weight, bias, strides=_ints(stride, count), dilations=_ints(dilation, count),
               group=int(groups), pads=pads, auto_pad=auto, kernel_shape=list(weight.shape[2:]), shape=shape)
    return reshape(b, out, [d if d >= 0 else 0 for d in shape[1:]], node.type.shape) if unbatched else out


@register("Convolution", "ConvolutionStr")
def convolution_general(b, node, x, weight, bias, stride, padding, dilation, transposed=False, output_padding=0,
                        groups=1):
    if transposed:
        raise Unsupported("a transposed convolution")
    return convolution_ext(b, node, x, weight, bias, stride, padding, dilation, groups)
