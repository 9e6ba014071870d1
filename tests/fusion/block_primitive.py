"""The block op as a primitive of MindSpore, arrays in and out."""
from __future__ import annotations

import mindspore as ms
import native
import numpy as np
from mindspore import Tensor, nn

from ms_flash import backends
from ms_flash.mha_spec import GRADIENTS, MHA_SLOTS, MhaSpec
from ms_flash.spec import Arg


class Block(nn.Cell):
    def __init__(self, primitive):
        super().__init__()
        self.primitive = primitive

    def construct(self, x, context, context_v, w_q, w_k, w_v, b_q, b_k, b_v, w_o, b_o, attn_mask, bias, alibi_slopes,
                  sinks, seed, drop_mask):
        return self.primitive(x, context, context_v, w_q, w_k, w_v, b_q, b_k, b_v, w_o, b_o, attn_mask, bias,
                              alibi_slopes, sinks, seed, drop_mask)[0]


class _Gradients(nn.Cell):
    def __init__(self, net, positions):
        super().__init__()
        self.net = net
        self.grad = ms.ops.GradOperation(get_all=True, sens_param=True)
        self.positions = positions

    def construct(self, *args):
        return self.grad(self.net)(*args)


def spec_of(given, **options):
    """The spec of a call with these arrays."""
    inputs = tuple(None if given.get(name) is None else Arg(given[name].shape, given[name].dtype.name)
                   for name in MHA_SLOTS)
    return MhaSpec.parse("fuse", inputs, **options)


_PARSED = {"right": "window_size", "left": "window_size", "scale": "softmax_scale", "dropout": "dropout_p",
           "align": "causal_align", "fill": "mask_fill"}


def parse_options(options):
    """Options of MhaSpec.parse from those of the native op."""
    parsed = {_PARSED.get(key, key): value for key, value in options.items() if key not in ("seed", "offset")}
    if "window_size" in parsed:
        parsed["window_size"] = (options.get("left", -1), options.get("right", -1))
    return parsed


def tensor(x):
    if x is None:
        return None
    if x.dtype == native.DTYPES["bfloat16"]:
        return Tensor(x.astype(np.float32)).astype(ms.bfloat16)
    return Tensor(np.ascontiguousarray(x))


def array(x):
    return x.float().asnumpy() if x.dtype == ms.bfloat16 else x.asnumpy()


def run_primitive(given, dy, spec, backend="cpu"):
    """Output and all gradients through MindSpore, of what `spec` describes."""
    net = Block(backends.select("fuse", backend).mha_forward(spec))
    args = [tensor(given.get(name)) for name in MHA_SLOTS]
    y = net(*args)
    grads = dict(zip([name for name in MHA_SLOTS if given.get(name) is not None],
                     _Gradients(net, ())(*args, tensor(dy))))
    names = [name for name in (*GRADIENTS, "bias") if given.get(name) is not None]
    dtypes = {"y": given["x"].dtype, **{"d" + name: given[name].dtype for name in names}}
    got = {"y": y, **{"d" + name: grads[name] for name in names}}
    return {name: array(x).astype(dtypes[name]) for name, x in got.items()}
