"""Why a place that looks like attention is left alone: a code for programs, a text for the user, and what to do."""

from __future__ import annotations

# code: (what was found, what the user can do). The texts are formatted with the details of the refusal.
REASONS = {
    "not_attention": (
        "the softmax is not between two matrix products: {detail}",
        "nothing to do, unless this is meant to be attention"),
    "softmax_axis": (
        "the softmax runs over axis {axis} of {shape}, not over the last axis, the keys",
        "take the softmax over the last axis of query @ key.T"),
    "scale_not_constant": (
        "the scores are multiplied by a Tensor that is not a constant number: {detail}",
        "multiply the query by it before the product; a temperature that is learned cannot be part of the kernel"),
    "scores_modified": (
        "the scores go through {op}, which the kernel does not know",
        "scores may be scaled, capped by c * tanh(x / c), biased and masked; move anything else out of the attention"),
    "scores_used": (
        "the scores or their gradient are also used by {op}{where}",
        "compute what is needed from query and key apart, or leave this attention unfused"),
    "probs_used": (
        "the attention weights are also used by {op}{where}",
        "do not return or reuse the attention weights (for nn.MultiheadAttention: need_weights=False)"),
    "probs_modified": (
        "the attention weights go through {op} before the product with the values",
        "only dropout may stand between softmax and product; a mask belongs before the softmax"),
    "weights_right": (
        "the attention weights are the right operand of their product with the values{where}",
        "write weights @ v; v @ weights adds up over the queries, along which the weights are not normalised"),
    "rows_not_kept": (
        "a reshape or transpose mixes the rows or keys of the scores: {detail}",
        "keep the last axis of the scores the keys, and the queries before it"),
    "mask_order": (
        "{detail}, an order that one mask and one bias cannot express",
        "add the bias first, then mask"),
    "mask_shape": (
        "the shape {shape} of a mask or bias does not broadcast to the scores {scores}",
        "use a mask of (batch, heads or 1, queries or 1, keys or 1)"),
    "bias_repeats": (
        "a mask or bias of shape {shape} repeats the scores {scores} along an axis that query and key do not have",
        "give the query that axis before the product, by broadcast_to"),
    "fill_not_constant": (
        "the value put in the place of masked scores is not one constant number",
        "use a Python number such as float('-inf') or -1e9"),
    "multiplied_mask": (
        "the scores are multiplied by a mask",
        "use masked_fill, or add (1 - mask) * -10000"),
    "dropout_on_scores": (
        "dropout is applied to the scores, before the softmax",
        "apply it to the attention weights, after the softmax"),
    "dropout_off": (
        "the attention weights have dropout, and fusion of dropout is switched off",
        "fuse(dropout=True); the kernel draws other random numbers than MindSpore's"),
    "dtype": (
        "query, key and value are {dtypes}",
        "use one of float32, float16, bfloat16 for all three"),
    "dynamic_shape": (
        "a shape is not known while the graph is compiled: {detail}",
        "compile with fixed shapes"),
    "shape": (
        "the shapes do not fit one attention: {detail}",
        "query, key and value need the same batch and head_dim"),
    "backward_differs": (
        "the backward pass is not exactly the gradient of this attention: {detail}",
        "please report this model; a custom bprop inside the attention cannot be fused"),
    "cycle": (
        "the gradient of this attention is needed to compute its own input",
        "nothing to do"),
    "second_order": (
        "the graph holds a gradient of the gradient of this attention",
        "the kernel has no second derivative; leave this attention unfused"),
    "other_graph": (
        "a part of the attention is in another graph (control flow): {detail}",
        "keep one attention within one branch"),
    "not_block": (
        "not at level block: {detail}",
        "nothing to do: level layout serves it"),
    "backend": (
        "no backend can run it: {detail}",
        "see python -m ms_flash doctor"),
    "error": (
        "the matcher failed: {detail}",
        "please report this model"),
}


class Refusal(Exception):
    """Raised where a match ends; `code` is one of REASONS."""

    def __init__(self, code, **details):
        found, self.hint = REASONS[code]
        self.code, self.text = code, found.format(**details)
        super().__init__(f"{code}: {self.text}")
