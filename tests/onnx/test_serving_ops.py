"""The ops for inference in an export: parts are merged in standard ops, a cache in a parameter is refused."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
import zoo
from mindspore import Parameter, Tensor, nn
from ms_flash.onnx_export import ExportError
from ms_flash.onnx_export.runtime import Runtime

import ms_flash
from ms_flash import export_onnx, reference


class Halves(nn.Cell):
    """Attention over two halves of the keys, merged."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def construct(self, q, k, v, hidden, other):
        a, lse_a = ms_flash.flash_attention(q, k, v, hidden, layout=self.layout, return_lse=True)
        b, lse_b = ms_flash.flash_attention(q, v, k, other, layout=self.layout, return_lse=True)
        return ms_flash.merge_attention([a, b], [lse_a, lse_b], layout=self.layout)


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16])
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_merged_parts(layout, dtype, tmp_path):
    """Rows without a key in the first part, in the second, and in both."""
    q, k, v = (zoo.floats(2, 4, n, 8, seed=i).astype(dtype) for i, n in enumerate((5, 7, 7)))
    hidden, other = np.zeros((2, 2, 4, 5, 7), bool)
    hidden[0, :, 1:3], other[0, :, 2:4] = True, True
    given = [q, k, v] if layout == "BNSD" else [x.swapaxes(1, 2) for x in (q, k, v)]
    axis = 2 if layout == "BNSD" else 1
    axes = {"q": {0: "batch", axis: "queries"}, "k": {0: "batch", axis: "keys"}, "v": {0: "batch", axis: "keys"},
            **{name: {0: "batch", 2: "queries", 3: "keys"} for name in ("hidden", "other")}}
    certificate = export_onnx(Halves(layout), *given, Tensor(hidden), Tensor(other), file_name=tmp_path / "n.onnx",
                              dynamic_axes=axes)
    feeds = dict(zip(axes, (*(x.asnumpy() for x in given), hidden, other)))
    out, lse = Runtime(certificate.path).run(feeds)
    out = out if layout == "BNSD" else out.swapaxes(1, 2)
    q, k, v = (x.asnumpy() for x in (q, k, v))
    both = {"k": np.concatenate([k, v], 2), "v": np.concatenate([v, k], 2)}
    exact, exact_lse, _ = reference.forward(q, **both, attn_mask=np.concatenate([hidden, other], -1))
    np.testing.assert_allclose(out, exact, atol=2e-3 if dtype == ms.float16 else 1e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)
    assert np.isneginf(lse[0, :, 2]).all() and not out[0, :, 2].any()


def test_cache_in_a_parameter_is_refused_with_advice(tmp_path):
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.k_cache, self.v_cache = (Parameter(Tensor(np.zeros((2, 16, 2, 8)), ms.float32), name=name)
                                          for name in ("k_cache", "v_cache"))

        def construct(self, q, k, v, lengths):
            return ms_flash.flash_attention_with_kvcache(q, self.k_cache, self.v_cache, k, v, cache_seqlens=lengths)

    inputs = [zoo.floats(2, 1, 2, 8, seed=i) for i in range(3)]
    with pytest.raises(ExportError, match=r"a model keeps nothing: make past keys and values inputs and outputs"):
        export_onnx(Net(), *inputs, Tensor([3, 5], ms.int32), file_name=tmp_path / "n.onnx", verify=False)
