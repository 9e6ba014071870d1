"""What happens to a call over a cache before its op runs: at the call, or while a graph is compiled."""

from __future__ import annotations

from . import backends
from .compile_time import CompileTime
from .kvcache_spec import KVCACHE_SLOTS, KvCacheSpec, MergeSpec, checked_parts
from .resolve import described, handle_of
from .spec import Arg, value_error

_FUNC = "flash_attention_with_kvcache"
_LENGTHS, _TABLE, _INPUTS = KVCACHE_SLOTS.index("cache_seqlens"), KVCACHE_SLOTS.index("block_table"), len(KVCACHE_SLOTS)


class _ResolveKvCache(CompileTime):
    """Turns a request into the op that serves it.

    The arguments are the backend, the inputs by slot and the options of KvCacheSpec.parse; the result is a tuple
    (handle, takes_none, returns_caches, form, empty): `op_of(handle)` is the primitive to call, and with
    `returns_caches` it does not write into the caches but returns what they have to be. `form` is what the backend
    wants to know beside the inputs (``None``: nothing). `empty` is ``None``, or, where there is no query
    and the backend takes no empty Tensor, the shapes of output and LSE, and that of a query to call the op with all the
    same, for what it appends (``None``: no call).
    """

    def __init__(self):
        super().__init__("MsFlashResolveKvCache", _resolve)

    def __infer__(self, *items):
        resolved = super().__infer__(*items)
        given = dict(zip(KVCACHE_SLOTS, items[1:]))
        for name in ("k_cache", "v_cache") if given["k"]["dtype"] is not None else ():
            # Anything else, a cast copy of a Parameter under mixed precision too, is gone after the graph.
            if not str(given[name]["dtype"]).startswith("Ref"):
                raise value_error(
                    _FUNC, f"'{name}' must be a Parameter in a graph, because new tokens are written into it, but got "
                           "another value of the graph. Hint: mixed precision casts Parameters into copies; keep the "
                           "cache in the dtype of the computation.")
        return resolved

    def __call__(self, backend, *args):
        given = args[:_INPUTS]
        chosen, spec = _parsed(backend, *[described(x) for x in given], *args[_INPUTS:])
        # Values are data: only PyNative can see them before the op runs. In a graph the op itself checks.
        table = given[_TABLE]
        spec.check_values(given[_LENGTHS].asnumpy(), None if table is None else table.asnumpy())
        if spec.appends:
            _check_writable(chosen, given[1], given[2])
        return _result(chosen, spec, args[_INPUTS:])


def _parsed(backend, *args):
    chosen = backends.select(_FUNC, backend)
    spec = KvCacheSpec.parse(_FUNC, args[:_INPUTS], args[_INPUTS:])
    if not chosen.dynamic_shape and not spec.static:
        raise value_error(_FUNC, f"the backend '{chosen.name}' needs shapes that are known when a graph is compiled, "
                                 f"but got query {spec.inputs[0]}. Hint: use another backend, or PyNative mode.")
    return chosen, spec


def _resolve(backend, *args):
    return _result(*_parsed(backend, *args), args[_INPUTS:])


def _result(chosen, spec, options):
    empty = None
    if spec.empty and not chosen.takes_empty:
        shapes, one = (spec.attention.out_shape, spec.attention.lse_shape), None
        if spec.appends and spec.attention.batch:
            one = tuple(size or 1 for size in spec.inputs[0].shape)
            spec = KvCacheSpec.parse(_FUNC, (Arg(one, spec.dtype), *spec.inputs[1:]), options)
        empty = (*shapes, one)
    returns_caches = spec.appends and not chosen.writes_inputs
    return handle_of(chosen.kvcache(spec)), chosen.takes_none, returns_caches, chosen.kvcache_form(spec), empty


def _check_writable(chosen, k_cache, v_cache):
    """MindSpore gives ops a copy of a view, and what they write there would be lost."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not chosen.hands_over(cache):
            raise value_error(_FUNC, f"'{name}' must have memory of its own, because new tokens are written into it, "
                                     f"but got {chosen.copied}. Hint: keep a Parameter for each cache.")
    if k_cache is v_cache:
        raise value_error(_FUNC, "'k_cache' and 'v_cache' must be two Tensors, but got one for both.")


def _checked_parts(name, *parts):
    """The dtype of a list of Tensors of one shape and dtype."""
    return checked_parts("merge_attention", name, parts)


def _resolve_merge(backend, layout, *inputs):
    chosen = backends.select("merge_attention", backend)
    spec = MergeSpec.parse("merge_attention", inputs, layout)
    if not chosen.dynamic_shape and not spec.static:
        raise value_error("merge_attention", f"the backend '{chosen.name}' needs shapes that are known when a graph is "
                                             f"compiled, but got outs {inputs[0]}.")
    return handle_of(chosen.merge(spec)), chosen.attribute(spec)


resolve_kvcache = _ResolveKvCache()
resolve_merge = CompileTime("MsFlashResolveMerge", _resolve_merge)
dtype_of_parts = CompileTime("MsFlashMergeParts", _checked_parts)
