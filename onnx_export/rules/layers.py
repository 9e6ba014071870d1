"""Softmax, normalisations, pooling, dropout, rotary embedding."""

from __future__ import annotations

from ..builder import Unsupported
from ..mindir import TensorType
from . import register
from .arithmetic import binary, halves
from .shape import axes_of, reshape
from .structure import Unavailable


@register("Softmax", "SoftmaxExt", "LogSoftmax", "LogSoftmaxExt")
def softmax(b, node, x, axis=-1, *rest):
    axes = axes_of(axis)
    if len(axes) != 1:
        raise Unsupported("more than one axis")
    x = b.tensor(x, node.type.dtype)
    return b.op("LogSoftmax" if node.op.startswith("Log") else "Softmax", x, axis=axes[0])


@register("LayerNorm", "LayerNormV3")
def layer_norm(b, node, x, gamma, beta, norm_axis=-1, params_axis=-1, epsilon=1e-7):
    if params_axis % x.rank != norm_axis % x.rank:
        raise Unsupported(f"begin_norm_axis {norm_axis} with begin_params_axis {params_axis}")
    return _layer_norm(b, node, x, gamma, beta, norm_axis % x.rank, epsilon)


@register("LayerNormExt")
def layer_norm_ext(b, node, x, normalized_shape, gamma=None, beta=None, epsilon=1e-5):
    axis = x.rank - len(axes_of(normalized_shape))
    if gamma is None:
        gamma = b.constant([1.0] * int(x.shape[-1]), x.dtype) if axis == x.rank - 1 else None
    if gamma is None:
        raise Unsupported("several axes without a weight")
    return _layer_norm(b, node, x, gamma, beta, axis, epsilon)


def _layer_norm(b, node, x, gamma, beta, axis, epsilon):
    y = b.op("LayerNormalization", x, b.cast(gamma, x.dtype), None if beta is None else b.cast(beta, x.dtype),
             axis=axis - x.rank, epsilon=float(epsilon))
    mean_shape = x.shape[:axis] + (1,) * (x.rank - axis)
    if isinstance(node.type, TensorType):
        return y
    lost = Unavailable("the statistics of LayerNorm")
    return (y, *[lost] * (len(node.type) - 1)) if mean_shape else (y,)


@register("RmsNorm")
def rms_norm(b, node, x, gamma, epsilon=1e-6):
    return rms(b, x, gamma, epsilon), Unavailable("the statistics of RmsNorm")


@register("AddRmsNorm")
def add_rms_norm(b, node, x, residual, gamma, epsilon=1e-6):
    total = binary(b, "Add", x, residual)
    return rms(b, total, gamma, epsilon), Unavailable("the statistics of AddRmsNorm"), total


def rms(b, x, gamma, epsilon):
    """x / sqrt(mean(x^2) + epsilon) * gamma, in float32."""
    axis = x.rank - gamma.rank
    wide = b.cast(x, "float32")
    kept = x.shape[:axis] + (1,) * gamma.rank
    mean = b.op("ReduceMean", b.op("Mul", wide, wide), b.constant(list(range(axis - x.rank, 0)), "int64"), keepdims=1,
                shape=kept)
    root = b.op("Sqrt", binary(b, "Add", mean, b.constant(epsilon, "float32")))
    normal = binary(b, "Div", wide, root)
    return b.cast(binary(b, "Mul", normal, b.cast(gamma, "float32")), x.dtype)


@register("GroupNorm")
def group_norm(b, node, x, groups, gamma=None, beta=None, epsilon=1e-5):
    """Through InstanceNormalization: groups become channels."""
    y = reshape(b, x, [0 if x.shape[0] < 0 else x.shape[0], groups, -1], (x.shape[0], groups, -1))
    ones, zeros = b.constant([1.0] * groups, x.dtype), b.constant([0.0] * groups, x.dtype)
    y = b.op("InstanceNormalization", y, ones, zeros, epsilon=float(epsilon))
    y = b.op("Reshape", y, b.op("Shape", x, dtype="int64", shape=(x.rank,)), shape=x.shape)
    tail = [-1] + [1] * (x.rank - 2)
    for op, weight in (("Mul", gamma), ("Add", beta)):
        if weight is not None:
            y = binary(b, op, y, b.op("Reshape", weight, b.constant(tail, "int64"),
                                      shape=(weight.shape[0], *[1] * (x.rank - 2))))
    lost = Unavailable("the statistics of GroupNorm")
    return y if isinstance(node.type, TensorType) else (y, *[lost] * (len(node.type) - 1))


@register("BatchNorm", "BatchNormExt")
def batch_norm(b, node, x, gamma, beta, mean, var, training=False, *rest):
    epsilon = rest[0] if node.op == "BatchNorm" else rest[1]
    if training:
        raise Unsupported("a batch norm in training mode")
    y = b.op("BatchNormalization", x, gamma, beta, mean, var, epsilon=float(epsilon))
    lost = Unavailable("the statistics of BatchNorm")
    return y if isinstance(node.type, TensorType) else (y, *[lost] * (len(node.type) - 1))


@register("Dropout", "DropoutExt", "Dropout2D", "Dropout3D", "Dropout2dExt", "DropoutDoMask")
def dropout(b, node, *inputs):
    raise Unsupported("it drops at random also in evaluation mode: give it training=self.training, or use nn.Dropout")


@register("Generator", "UniformReal", "StandardNormal", "Multinomial", "RandExt", "RandnExt")
def random(b, node, *inputs):
    raise Unsupported("it draws random numbers; if that is because dropout is active, give the call "
                      "training=self.training or dropout_p=0.0")


@register("MaxPool", "AvgPool")
def pool(b, node, x, kernel=None, strides=None, mode=None, *rest):
    attrs = node.attrs
    kernel = [int(n) for n in (attrs["kernel_size"] if kernel is None else kernel)][-2:]
    strides = [int(n) for n in (attrs["strides"] if strides is None else strides)][-2:]
    mode = attrs.get("pad_mode") if mode is None else mode
    same = mode in ("same", "SAME", 1)
    pads = None if same else [0, 0, 0, 0]
    extra = {"count_include_pad": 0} if node.op == "AvgPool" else {}
    return b.op("MaxPool" if node.op == "MaxPool" else "AveragePool", x, kernel_shape=kernel, strides=strides,
                pads=pads, auto_pad="SAME_UPPER" if same else None, shape=node.type.shape, **extra)


@register("AvgPool2D")
def average_pool(b, node, x, kernel, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor=None):
    if divisor is not None:
        raise Unsupported("divisor_override")
    two = lambda v: [int(n) for n in v] * (2 if len(v) == 1 else 1) if isinstance(v, tuple) else [int(v)] * 2
    kernel = two(kernel)
    return b.op("AveragePool", x, kernel_shape=kernel, strides=kernel if stride in (None, ()) else two(stride),
                pads=two(padding) * 2, ceil_mode=int(bool(ceil_mode)), count_include_pad=int(bool(count_include_pad)),
                shape=node.type.shape)


@register("MaxPoolWithIndices", "MaxPoolWithMask")
def max_pool_ext(b, node, x, kernel, strides=None, pads=0, dilation=1, ceil_mode=False, *rest):
    two = lambda v: [int(n) for n in v] * (2 if len(v) == 1 else 1) if isinstance(v, tuple) else [int(v)] * 2
    kernel = two(kernel)
    y = b.op("MaxPool", x, kernel_shape=kernel, strides=kernel if strides in (None, ()) else two(strides),
             pads=two(pads) * 2, dilations=two(dilation), ceil_mode=int(bool(ceil_mode)), shape=node.type[0].shape)
    return y, Unavailable("the positions of MaxPool")


@register("AdaptiveAvgPool2D", "AdaptiveAvgPool2DExt", "AdaptiveAvgPool1D")
def adaptive_pool(b, node, x, size=None):
    size = node.attrs["output_size"] if size is None else size
    count = 1 if node.op.endswith("1D") else 2
    sizes = [int(n) if n is not None else -1 for n in (size if isinstance(size, tuple) else (size,) * count)]
    lengths = x.shape[-count:]
    sizes = [n if n > 0 else d for n, d in zip(sizes, lengths)]
    if all(n == 1 for n in sizes):
        return b.op("ReduceMean", x, b.constant(list(range(-count, 0)), "int64"), keepdims=1, shape=node.type.shape)
    if any(d < 0 or d % n for d, n in zip(lengths, sizes)):
        raise Unsupported(f"lengths {lengths} that are no multiple of the output size {tuple(sizes)}")
    kernel = [d // n for d, n in zip(lengths, sizes)]
    return b.op("AveragePool", x, kernel_shape=kernel, strides=kernel, shape=node.type.shape)


@register("RotaryPositionEmbedding")
def rotary(b, node, x, cos, sin, mode=0):
    if mode not in (0, 1):
        raise Unsupported(f"mode {mode}")
    if mode == 0:
        first, second = halves(b, x)
        turned = b.op("Concat", b.op("Neg", second), first, axis=-1, shape=x.shape)
    else:
        pairs = reshape(b, x, [0] * (x.rank - 1) + [x.shape[-1] // 2, 2], (*x.shape[:-1], x.shape[-1] // 2, 2))
        first, second = b.op("Split", pairs, b.constant([1, 1], "int64"), axis=-1,
                             outputs=(TensorType(x.dtype, (*pairs.shape[:-1], 1)),) * 2)
        turned = b.op("Concat", b.op("Neg", second), first, axis=-1, shape=pairs.shape)
        turned = reshape(b, turned, [0] * (x.rank - 1) + [x.shape[-1]], x.shape)
    return binary(b, "Add", binary(b, "Mul", x, cos), binary(b, "Mul", turned, sin))


@register("ResizeNearestNeighbor", "UpsampleNearest2D", "ResizeNearestNeighborV2")
def resize_nearest(b, node, x, *rest):
    sizes = b.vector([b.length(x, 0), b.length(x, 1), *node.type.shape[2:]])
    if -1 in node.type.shape[2:]:
        raise Unsupported("a size that the graph computes")
    return b.op("Resize", x, None, None, sizes, mode="nearest", nearest_mode="floor",
                coordinate_transformation_mode="asymmetric", shape=node.type.shape)

