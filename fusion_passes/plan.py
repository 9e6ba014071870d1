"""From a graph to what the bridge does to it: every softmax is a site, fused or left with a reason."""

from __future__ import annotations

import functools
import logging
from dataclasses import asdict, dataclass

from . import fused as build
from .backward import SHAPE_ONLY, Backward, BackwardProof
from .block import Block, Sums
from .dropout import seed
from .forward import Forward, ForwardGrammar, used
from .ir import FLOATS, VIEWS_WITH_STATE, Graph, orders
from .level import takes_projections
from .masks import Masking, settle
from .reasons import Refusal

_log = logging.getLogger("ms_flash.fusion")
_HANDS_ON = ("Cast", "TupleGetItem", "MakeTuple", *SHAPE_ONLY)     # ops that may die with what they read


@dataclass
class Site:
    """One softmax of a graph, for the report."""

    node: int
    scope: str
    line: str
    fused: bool = False
    kind: str = ""              # forward and backward, or forward
    level: str = ""
    shape: str = ""
    dtype: str = ""
    scale: float = 0.0
    mask: str = ""
    softcap: float = 0.0
    dropout: float = 0.0
    transposes: int = 0         # copies that the fused op still needs
    note: str = ""
    code: str = ""
    reason: str = ""
    hint: str = ""


def plan_graph(described: dict, options: dict) -> tuple[dict, list[dict]]:
    """Plans the fusion of one graph.

    Args:
        described (dict): The graph, as the bridge describes it.
        options (dict): level (str), dropout (bool), memory (str), and handle, a function that takes a Python primitive
            and returns the number by which the plan may name it.

    Returns:
        tuple, the plan (dict with new, replace, order) and the sites (list of dicts).
    """
    planner = Planner(Graph(described), options)
    for softmax in planner.grammar.softmax_nodes():
        planner.match(softmax)
    for softmax in planner.matches:
        planner.take(softmax)
    planner.sums.settle(planner.plan, planner.options.get("handle"))
    planner.forget()
    return planner.plan, [asdict(site) for site in planner.sites]


@dataclass(eq=False)
class Match:
    """An attention, before it is decided what is put in its place."""

    forward: Forward
    backward: Backward | None
    masking: Masking

    @functools.cached_property
    def gone(self) -> set:
        """What is no longer needed once this is fused."""
        found = self.forward.inner - {None}
        return found if self.backward is None else found | self.backward.inner | set(self.backward.leaves)


def _refusal(softmax, error):
    """`error` as a Refusal."""
    if isinstance(error, Refusal):
        return error
    _log.error("matching %s failed", softmax, exc_info=error)
    return Refusal("error", detail=f"{type(error).__name__}: {error}")


class Planner:
    """Plans one graph, site by site."""

    def __init__(self, graph, options):
        self.graph, self.options = graph, {"level": "auto", "dropout": True, **options}
        self.options.setdefault("seed", seed)
        self.options["seeds"] = {}      # of the dropouts that are fused already
        self.grammar = ForwardGrammar(graph)
        self.plan = {"new": [], "replace": [], "order": []}
        self.sites = []
        self.sums = Sums(self.grammar.views)
        self.matches = {}       # softmax: Match, or the Refusal

    def match(self, softmax):
        """Notes what is around `softmax`, or why that is no attention."""
        try:
            forward = self.grammar.match(softmax)
            self._check(forward)
            masking = settle(forward.scores, forward.zeroed)
            self.matches[softmax] = Match(forward, BackwardProof(self.grammar, forward).run(), masking)
        except Exception as error:      # one site that the matcher stumbles over leaves the others alone
            self.matches[softmax] = _refusal(softmax, error)

    def forget(self):
        """Lets go of masks as large as the scores, which the cycles among nodes would keep until Python collects them.
        """
        self.grammar.constants.forget()
        for match in self.matches.values():
            for term in match.forward.scores.terms if isinstance(match, Match) else ():
                term.const = None

    def take(self, softmax):
        """Adds the site of `softmax`, and what fuses it to the plan."""
        site = Site(softmax.id, softmax.scope, softmax.line)
        self.sites.append(site)
        match = self.matches[softmax]
        try:
            if isinstance(match, Refusal):
                raise match
            self._fuse(softmax, match, site)
        except Exception as error:
            refusal = self.matches[softmax] = _refusal(softmax, error)
            site.code, site.reason, site.hint = refusal.code, refusal.text, refusal.hint

    def _fuse(self, softmax, match, site):
        forward, backward, masking = match.forward, match.backward, match.masking
        best, narrow = self._widened(self._built(forward, backward, masking, softmax))
        if forward.drops:
            self.options["seeds"].setdefault(self.graph.copies[forward.dropout], best.seed)
        self.plan["new"] += best.emit.finish()
        self.plan["replace"] += best.replace
        self.plan["order"] += best.order
        self.sums.take(best)
        spec = best.spec
        site.fused, site.kind = True, "forward" if backward is None else "forward and backward"
        site.level = "core" if not best.follow else "layout" if best.block is None else "block"
        heads = f"{spec.num_heads}" if spec.num_heads == spec.num_kv_heads else f"{spec.num_heads}/{spec.num_kv_heads}"
        site.shape = f"B{spec.batch} N{heads} S{spec.q_len}" + (f"x{spec.k_len}" if spec.k_len != spec.q_len else "") \
            + f" D{spec.head_dim}" + (f"/{spec.v_head_dim}" if spec.v_head_dim != spec.head_dim else "")
        site.dtype, site.scale, site.mask = spec.dtype, spec.scale, masking.kind
        moved = f"moved in memory for the kernel: {', '.join(best.moved)}" if best.follow and best.moved else ""
        site.note = "; ".join(filter(None, (masking.note, moved, narrow)))
        site.softcap, site.dropout = spec.softcap, round(spec.dropout_p, 6)
        site.transposes = best.copies

    def _widened(self, built):
        """The best of `built`, at level block where that is wanted and possible, checked as a whole; and why not."""
        narrow = ""
        for made in built if takes_projections(self.options) else ():
            try:
                wide = Block(self.grammar, made, self.options).build()
                self._remove(wide)
                return wide, ""
            except Refusal as refusal:
                narrow = narrow or refusal.text
            except Exception as error:      # level layout is proven already
                _log.exception("level block failed")
                narrow = f"not at level block: {type(error).__name__}: {error}"
        self._remove(built[0])
        return built[0], narrow

    def _remove(self, made):
        others = [m for m in self.matches.values() if isinstance(m, Match) and m.forward is not made.forward]
        Removal(self.grammar, made, set().union(*(m.gone for m in others))).run()

    def _check(self, forward):
        operands = forward.scores.product.operands + forward.output.operands[1:]
        dtypes = {node.dtype for node in operands}
        if len(dtypes) != 1 or not dtypes <= set(FLOATS):
            raise Refusal("dtype", dtypes=" and ".join(sorted(map(str, dtypes))))
        if forward.drops and not self.options["dropout"]:
            raise Refusal("dropout_off")
        q, k, v = forward.query.shape, forward.key.shape, forward.value.shape
        if q[:-2] != v[:-2] and build.math.prod(q[:-2]) != build.math.prod(v[:-2]):
            raise Refusal("shape", detail=f"scores have the batch {q[:-2]}, values {v[:-2]}")
        if k[-2] != v[-2]:
            raise Refusal("shape", detail=f"{k[-2]} keys, but {v[-2]} values")

    def _built(self, forward, backward, masking, softmax):
        """The site in the geometries and layouts that can be, that with the fewest copies first."""
        found, refusal = [], None
        layouts = ["BNSD"] if self.options["level"] == "core" else ["BSND", "packed", "BNSD", "SBH"]
        geometries = build.geometries(forward, masking)
        fewest = min((g.kv_heads for g in geometries), default=0)
        for geometry in geometries:
            for layout in layouts:
                try:
                    made = build.Fused(self.grammar, forward, backward, masking, geometry, layout, self.options,
                                       f"s{len(self.sites)}_", softmax).build()
                except (Refusal, build.NotShared) as why:
                    refusal = refusal or (why if isinstance(why, Refusal) else None)
                    continue
                cost = made.copies, geometry.kv_heads / geometry.heads, len(made.emit.new), geometry.heads == 1
                found.append((cost, made))
                if not made.copies and geometry.kv_heads == fewest and geometry.heads > 1:
                    return self._in_order(found)
        if not found:
            raise refusal or Refusal("shape", detail="its batch does not divide into batch and heads")
        return self._in_order(found)

    @staticmethod
    def _in_order(found):
        return [made for _, made in sorted(found, key=lambda pair: pair[0])]


class Removal:
    """Checks that what a fused site replaces vanishes as a whole, and mends the order of side effects."""

    def __init__(self, grammar, made, others):
        """`others`: what goes with other sites. One gradient of the output, say, serves two whose outputs are added."""
        self.graph, self.views, self.made, self.others = grammar.graph, grammar.views, made, others
        forward, backward = made.forward, made.backward
        self.inner = set(forward.inner) | made.passed
        if backward is not None:
            self.inner |= backward.inner | set(backward.leaves)
        self._dead = {}

    def run(self):
        """Raises Refusal if anything inside is needed outside."""
        kept = [(node, user) for node in sorted(self.inner, key=self.graph.order.get) if node not in self.made.replaced
                for user, position in node.users if not self._dies(user, position)
                and not (node in self.others and self._goes_with_others(user, position))]
        if kept:    # the first in the forward pass says most
            node, user = min(kept, key=lambda pair: (not pair[1].line, self.graph.order[pair[1]]))
            while user.op in ("MakeTuple", "Depend") and user.users:
                user = user.users[0][0]
            raise used("probs_used" if self._is_weights(node) else "scores_used", user)
        self._check_cycle()
        self._mend_order()

    def _is_weights(self, node):
        forward = self.made.forward
        return node is forward.softmax or node in forward.before

    def _dies(self, node, position=0):
        if node in self.made.replaced or orders(node, position):
            return True
        if node not in self._dead:
            self._dead[node] = False
            may = node in self.inner or self.views.source(node) is not None or node.op in _HANDS_ON
            self._dead[node] = may and bool(node.users) and all(self._dies(u, p) for u, p in node.users)
        return self._dead[node]

    def _goes_with_others(self, node, position):
        if node in self.others or self._dies(node, position):
            return True
        return self.views.source(node) is not None and bool(node.users) \
            and all(self._goes_with_others(user, at) for user, at in node.users)

    def _sources(self):
        """Nodes of the old graph that the new ones take."""
        ids = {x for new in self.made.emit.new for x in new["inputs"] if isinstance(x, int)}
        return [self.graph.by_id[i] for i in ids]

    def _check_cycle(self):
        made = self.made
        gradients = self._gradients()
        leaves = set(made.replaced) if gradients else set()
        outputs = self._forward_replaced()
        for source in self._sources():
            targets = leaves - outputs if source in gradients else set(made.replaced)
            if targets and self.graph.depends_on(source, targets):
                raise Refusal("cycle")

    def _forward_replaced(self):
        """The replaced nodes that stand for the output, not for a gradient."""
        if self.made.outputs is not None:
            return self.made.outputs
        product = self.made.forward.output.node
        found = set()
        if product is None:
            return found
        for node in self.made.replaced:
            at = node
            while at is not None and at is not product:
                at = at.inputs[0] if at.op == "Cast" else self.views.source(at)
            if at is product:
                found.add(node)
        return found

    def _mend_order(self):
        """Side effects that waited for a node that vanishes wait for the fused ops instead."""
        made = self.made
        gone = {node for node in self.inner if node not in made.replaced}
        todo = [n for p in (made.forward.scores.product, made.forward.output) for operand in p.operands
                for n in self.views.chain(operand)] + [n for node in gone for n, _ in node.users]
        gone |= {n for n in todo if n not in made.replaced and n.op != "UpdateState" and self._dies(n)}
        both = None
        for node in gone:
            waiting = {u for u, position in node.users if orders(u, position)}
            if not waiting:
                continue
            needed = {u for u in waiting if any(self.graph.depends_on(s, {u}) for s in self._sources())}
            if not needed and made.gradient is not None:
                both = both or made.emit.together([made.out, made.gradient])
                made.order.append([node.id, both])
            elif not self._forward_needs(waiting):
                made.order.append([node.id, made.out.operand])
            else:
                made.order.append([node.id, self._origin(node).id])

    def _forward_needs(self, waiting):
        gradients = self._gradients()
        return any(self.graph.depends_on(s, waiting) for s in self._sources() if s not in gradients)

    def _gradients(self):
        """The gradient of the output, and what that is a view of."""
        return set() if self.made.backward is None else set(self.views.chain(self.made.backward.grad.base))

    def _origin(self, node):
        """What a view that vanishes was a view of."""
        base = self.views.chain(node)[-1]
        if base is node or (node.op not in VIEWS_WITH_STATE and node.op != "Load" and not self.views.source(node)):
            raise Refusal("scores_used", op="a side effect that must come after it", where="")
        return base


