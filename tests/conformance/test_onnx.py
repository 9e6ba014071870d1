"""Every `Attention` case of ONNX's own backend tests, through adapters as thin as the two calls differ.

The cases come with the onnx package, 93 from version 1.23 on. Expanded twins (the same case as a function body) are
left out. ONNX's tolerances hold for float32; 16-bit cases follow FlashAttention's rule.
"""
from __future__ import annotations

import flash_rule
import numpy as np
import pytest
from flash_rule import reference

onnx = pytest.importorskip("onnx")


def _collect():
    import onnx.backend.test.case.node.attention  # noqa: F401  importing it registers the cases
    from onnx.backend.test.case.node import _NodeTestCases

    return {case.name: case for case in _NodeTestCases if case.model.graph.node[0].op_type == "Attention"
            and len(case.model.graph.node) == 1 and not case.name.endswith("_expanded")}


CASES = _collect()


def test_there_are_93_cases():
    assert len(CASES) == 93, f"onnx {onnx.__version__} has {len(CASES)} cases: version 1.23 is needed"


def _heads_first(x, heads):
    """(B, S, N * D) -> (B, N, S, D)"""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) if x.ndim == 3 else x


class Adapter:
    """One case in the terms of `reference.forward`, and its results in the terms of ONNX."""

    def __init__(self, case):
        node, (inputs, outputs) = case.model.graph.node[0], case.data_sets[0]
        given = iter(inputs)
        self.tensors = {name: next(given) for name in node.input if name}
        expected = iter(outputs)
        self.expected = {name: next(expected) for name in node.output if name}
        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        self.flat = self.tensors["Q"].ndim == 3
        self.dtype = self.tensors["Q"].dtype
        self.call = self._call()

    def _call(self):
        attributes, tensors = self.attributes, self.tensors
        q, k, v = (_heads_first(tensors[name], attributes.get(f"{kind}_num_heads"))
                   for name, kind in (("Q", "q"), ("K", "kv"), ("V", "kv")))
        past = 0
        if "past_key" in tensors:
            past = tensors["past_key"].shape[2]
            k, v = np.concatenate([tensors["past_key"], k], 2), np.concatenate([tensors["past_value"], v], 2)
        self.present = {"present_key": k, "present_value": v}
        left, right = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
        if attributes.get("is_causal"):
            right = 0 if right < 0 else min(right, 0)
        call = {"q": q, "k": k, "v": v, "scale": attributes.get("scale"), "softcap": attributes.get("softcap", 0.0)}
        sq, sk = q.shape[2], k.shape[2]
        masked = None
        mask = tensors.get("attn_mask")
        if mask is not None:                                  # a mask shorter than the keys: the rest is masked out
            padding = [(0, 0)] * (mask.ndim - 1) + [(0, sk - mask.shape[-1])]
            if mask.dtype == bool:
                masked = ~np.pad(mask, padding, constant_values=False)
            else:
                call["bias"] = np.pad(mask, padding, constant_values=-np.inf)
        if "nonpad_kv_seqlen" in tensors:                     # the diagonal ends at each sequence's last valid key
            valid = tensors["nonpad_kv_seqlen"].reshape(-1, 1, 1, 1)
            masked = _or(masked, np.arange(sk) >= valid)
            masked = _or(masked, _outside(sq, sk, valid - sq, left, right))
        elif past in (0, sk - sq):
            call.update(left=left, right=right, align="bottom_right" if past else "top_left")
        else:                                                 # the diagonal starts at a key that is no corner
            masked = _or(masked, _outside(sq, sk, past, left, right))
        if masked is not None:
            call["attn_mask"] = masked
        return call

    def back(self, y):
        """(B, N, S, D) as the case has it."""
        return y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], -1) if self.flat else y


def _or(masked, more):
    return more if masked is None else masked | more


def _outside(sq, sk, shift, left, right):
    distance = np.arange(sk)[None, :] - np.arange(sq)[:, None] - shift
    return ((left >= 0) & (distance < -left)) | ((right >= 0) & (distance > right))


@pytest.mark.parametrize("name", CASES)
def test_output(name, backend):
    from public_api import attention

    adapter = Adapter(CASES[name])
    expected = adapter.expected["Y"].astype(np.float64)
    got = attention(adapter.call, backend)["out"]
    assert adapter.back(got).shape == expected.shape
    if adapter.dtype == np.float32:
        np.testing.assert_allclose(adapter.back(got), expected, rtol=CASES[name].rtol, atol=CASES[name].atol)
    else:
        exact = flash_rule.evaluate(adapter.call, None)
        naive = flash_rule.evaluate(adapter.call, None, rounding=adapter.dtype)
        flash_rule.check({"out": got}, exact, naive)
        # and the case's own numbers, which carry the rounding of an implementation in 16 bit
        np.testing.assert_allclose(adapter.back(got), expected, rtol=0, atol=8 * _epsilon(adapter.dtype))
    for key in set(adapter.present) & set(adapter.expected):
        np.testing.assert_array_equal(adapter.present[key], adapter.expected[key])


def _epsilon(dtype):
    return 2.0 ** (-10 if dtype == np.float16 else -7)


@pytest.mark.parametrize("name", CASES)
def test_output_of_the_float64_reference(name):
    adapter = Adapter(CASES[name])
    expected = adapter.expected["Y"].astype(np.float64)
    got = adapter.back(reference.forward(**adapter.call)[0])
    if adapter.dtype == np.float32:
        np.testing.assert_allclose(got, expected, rtol=CASES[name].rtol, atol=CASES[name].atol)
    else:
        np.testing.assert_allclose(got, expected, rtol=0, atol=8 * _epsilon(adapter.dtype))


@pytest.mark.parametrize("name", [name for name, case in CASES.items()
                                  if "qk_matmul_output" in case.model.graph.node[0].output])
def test_qk_matmul_output_on_the_reference(name):
    """ONNX's optional look inside: no op of ours has it, but attention over one key at a time has it as its LSE."""
    adapter = Adapter(CASES[name])
    call, mode = dict(adapter.call), adapter.attributes.get("qk_matmul_output_mode", 0)
    keys = call["k"].shape[2]
    window = [call.pop(name, default) for name, default in (("left", -1), ("right", -1), ("align", "top_left"))]
    call["attn_mask"] = _or(call.get("attn_mask"), ~reference.band(call["q"].shape[2], keys, *window))
    if mode == 3:
        call["v"] = np.broadcast_to(np.eye(keys), (*call["k"].shape[:3], keys))
        got = reference.forward(**call)[0]
    else:
        if mode < 2:
            call.pop("bias", None), call.pop("attn_mask")
        if mode < 1:
            call["softcap"] = 0.0
        got = np.stack([reference.forward(**_one_key(call, j))[1] for j in range(keys)], -1)
    expected = adapter.expected["qk_matmul_output"].astype(np.float64)
    tolerance = 1e-3 if adapter.dtype == np.float32 else 8 * _epsilon(adapter.dtype)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=CASES[name].atol)


def _one_key(call, j):
    one = dict(call, k=call["k"][:, :, j:j + 1], v=call["v"][:, :, j:j + 1])
    for name in ("attn_mask", "bias"):
        if name in one and one[name].shape[-1] > 1:
            one[name] = one[name][..., j:j + 1]
    return one
