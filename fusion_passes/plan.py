"""From a graph to what the bridge does to it: every softmax is a site, fused or left with a reason."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

from . import fused as build
from .backward import SHAPE_ONLY, BackwardProof
from .block import Block, Sums
from .dropout import seed
from .forward import ForwardGrammar, used
from .ir import FLOATS, VIEWS_WITH_STATE, Graph, orders
from .level import takes_projections
from .masks import settle
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
        planner.take(softmax)
    planner.sums.settle(planner.plan, planner.options.get("handle"))
    return planner.plan, [asdict(site) for site in planner.sites]


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

    def take(self, softmax):
        """Adds the site of `softmax`, and what fuses it to the plan."""
        site = Site(softmax.id, softmax.scope, softmax.line)
        self.sites.append(site)
        try:
            self._fuse(softmax, site)
        except Refusal as refusal:
            site.code, site.reason, site.hint = refusal.code, refusal.text, refusal.hint
        except Exception as error:      # one site that the matcher stumbles over leaves the others alone
            _log.exception("matching %s failed", softmax)
            refusal = Refusal("error", detail=f"{type(error).__name__}: {error}")
            site.code, site.reason, site.hint = refusal.code, refusal.text, refusal.hint

    def _fuse(self, softmax, site):
        forward = self.grammar.match(softmax)
        self._check(forward)
        masking = settle(forward.scores, forward.zeroed)
        backward = BackwardProof(self.grammar, forward).run()
        made = self._best(forward, backward, masking, softmax)
        best, narrow = self._widened(made)
        if forward.dropout is not None:
            self.options["seeds"].setdefault(self.graph.copies[forward.dropout], made.seed)
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
        site.note = "; ".join(filter(None, (masking.note, narrow)))
        site.softcap, site.dropout = spec.softcap, round(spec.dropout_p, 6)
        site.transposes = best.copies

    def _widened(self, made):
        """`made`, at level block where that is wanted and possible, checked as a whole; and why it is not, if so."""
        narrow = ""
        if takes_projections(self.options):
            try:
                wide = Block(self.grammar, made, self.options).build()
                Removal(self.grammar, wide).run()
                return wide, ""
            except Refusal as refusal:
                narrow = refusal.text
            except Exception as error:      # level layout is proven already
                _log.exception("level block failed")
                narrow = f"not at level block: {type(error).__name__}: {error}"
        Removal(self.grammar, made).run()
        return made, narrow

    def _check(self, forward):
        operands = forward.scores.product.operands + forward.output.operands[1:]
        dtypes = {node.dtype for node in operands}
        if len(dtypes) != 1 or not dtypes <= set(FLOATS):
            raise Refusal("dtype", dtypes=" and ".join(sorted(map(str, dtypes))))
        if forward.dropout is not None and not self.options["dropout"]:
            raise Refusal("dropout_off")
        q, k, v = forward.query.shape, forward.key.shape, forward.value.shape
        if q[:-2] != v[:-2] and build.math.prod(q[:-2]) != build.math.prod(v[:-2]):
            raise Refusal("shape", detail=f"scores have the batch {q[:-2]}, values {v[:-2]}")
        if k[-2] != v[-2]:
            raise Refusal("shape", detail=f"{k[-2]} keys, but {v[-2]} values")

    def _best(self, forward, backward, masking, softmax):
        """The geometry and layout that need the fewest copies."""
        best, refusal = None, None
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
                cost = made.copies, geometry.kv_heads / geometry.heads, geometry.heads == 1, len(made.emit.new)
                if best is None or cost < best[0]:
                    best = cost, made
                if not made.copies and geometry.kv_heads == fewest:
                    return made
        if best is None:
            raise refusal or Refusal("shape", detail="its batch does not divide into batch and heads")
        return best[1]


class Removal:
    """Checks that what a fused site replaces vanishes as a whole, and mends the order of side effects."""

    def __init__(self, grammar, made):
        self.graph, self.views, self.made = grammar.graph, grammar.views, made
        forward, backward = made.forward, made.backward
        self.inner = set(forward.inner) | made.passed
        if backward is not None:
            self.inner |= backward.inner | set(backward.leaves)
        self._dead = {}

    def run(self):
        """Raises Refusal if anything inside is needed outside."""
        kept = [(node, user) for node in sorted(self.inner, key=self.graph.order.get) if node not in self.made.replaced
                for user, position in node.users if not self._dies(user, position)]
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

    def _sources(self):
        """Nodes of the old graph that the new ones take."""
        ids = {x for new in self.made.emit.new for x in new["inputs"] if isinstance(x, int)}
        return [self.graph.by_id[i] for i in ids]

    def _check_cycle(self):
        made = self.made
        gradient = made.backward.grad.base if made.backward is not None else None
        leaves = {n for n in made.replaced if made.backward is not None and gradient is not None}
        outputs = self._forward_replaced()
        for source in self._sources():
            targets = leaves - outputs if source is gradient else set(made.replaced)
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
        grad = self.made.backward.grad.base if self.made.backward is not None else None
        return any(self.graph.depends_on(s, waiting) for s in self._sources() if s is not grad)

    def _origin(self, node):
        """What a view that vanishes was a view of."""
        base = self.views.chain(node)[-1]
        if base is node or (node.op not in VIEWS_WITH_STATE and node.op != "Load" and not self.views.source(node)):
            raise Refusal("scores_used", op="a side effect that must come after it", where="")
        return base


