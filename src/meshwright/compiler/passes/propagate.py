"""Give every value of a graph its sharding, and make every change of sharding explicit.

FX in, FX out: the result computes the same on one device, with ``redistribute`` nodes where a
value has to lie differently and an :class:`Annotation` with its sharding on every node.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.calls import emit, op_call, operand_nodes, overload
from meshwright.compiler.graph.program import Annotation, Graph, Value, annotation
from meshwright.compiler.graph.redistribute import redistribute
from meshwright.compiler.mesh import MICRO, Mesh, Sharding
from meshwright.compiler.mesh_paths import steps
from meshwright.compiler.passes.strategy import Decision, Held, Priority, decide
from meshwright.compiler.passes.wanted import wanted_shardings
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.arguments import unchanged
from meshwright.compiler.rules.rule import Offset, OpCall, Rule

DECISION = "meshwright_decision"
"""The key in ``node.meta`` under which lowering finds how a node is cut."""

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Placement:
    """How the values at a graph's border lie."""

    inputs: Mapping[Value, Sharding]
    outputs: Mapping[Value, Sharding]
    """Targets. Sums that a target does not name may stay owed where ``may_owe`` says so."""
    may_owe: frozenset[Value] = frozenset()
    storage: Mapping[Value, frozenset[str]] = field(default_factory=dict)
    """The axes by which an input is only stored in shards (a weight to be gathered before use)."""
    wanted: Mapping[Value, Sharding] = field(default_factory=dict)
    """How outputs should be made where nothing they are computed from is cut so (gradients)."""
    early: Mapping[Value, Sharding] = field(default_factory=dict)
    """Inputs that are brought into another sharding before anything else reads them."""


@dataclass(frozen=True)
class Chosen:
    """How a node is cut, kept for lowering: its op, its rule and the decision."""

    call: OpCall
    rule: Rule
    decision: Decision


@dataclass
class _Placed:
    """A value in the new graph."""

    node: fx.Node
    sharding: Sharding
    priority: dict[str, Priority]
    weight: bool = False
    """Whether it is made of stored weights alone, by casts and views."""
    terms: tuple[_Placed, _Placed] | None = None
    """Of a sum that nothing else reads: a term that owed nothing, and one that still owes (see ``_regroup``)."""


def propagate(
    graph: Graph,
    mesh: Mesh,
    placement: Placement,
    *,
    sequence: frozenset[str] = frozenset(),
    whole_contractions: bool = False,
    warn: Warn | None = None,
) -> Graph:
    """Propagate shardings from the placement of the inputs through the graph.

    ``sequence`` are the axes of sequence sharding. ``whole_contractions`` runs every contraction on
    whole operands (optimizers with whole-matrix rules). ``warn`` is told of ops without a rule.
    Raises E0305 when a value would have to be reduced or gathered over microbatches.
    """
    return _Propagation(graph, mesh, placement, sequence, whole_contractions, warn or (lambda text: None)).run()


class _Propagation:
    def __init__(
        self, graph: Graph, mesh: Mesh, placement: Placement, sequence: frozenset[str], whole: bool, warn: Warn
    ) -> None:
        self.graph = graph
        self.mesh = mesh
        self.placement = placement
        self.sequence = sequence
        self.whole = whole
        self.warn = warn
        self.new = fx.Graph()
        self.placed: dict[fx.Node, tuple[_Placed | None, ...]] = {}
        self.moved: dict[tuple[fx.Node, Sharding, str], _Placed] = {}
        self.paid: dict[fx.Node, _Placed] = {}
        self.rules: dict[Hashable, Rule] = {}
        self.decisions: dict[Hashable, Decision] = {}
        self.wanted = wanted_shardings(graph, mesh, placement.wanted)

    def run(self) -> Graph:
        roles = {node: value for value, node in self.graph.placeholders().items()}
        for node in self.graph.module.graph.nodes:
            if node.op == "placeholder":
                self._place_input(node, roles[node])
        for node in self.graph.module.graph.nodes:
            if node.op == "call_function":
                self._place_call(node)
            elif node.op == "output":
                self._place_outputs()
        module = fx.GraphModule(self.graph.module, self.new)
        return Graph(module, self.graph.signature)

    def _place_input(self, node: fx.Node, value: Value) -> None:
        copy = self.new.node_copy(node)
        sharding = self.placement.inputs.get(value) or Sharding.whole(annotation(node).shape)
        stored = self.placement.storage.get(value, frozenset())
        priority = {a: Priority.STORAGE if a in stored else Priority.HARD for a in sharding.axes}
        placed = _Placed(self._annotate(copy, node, sharding), sharding, priority, weight=value.kind == "parameter")
        target = self.placement.early.get(value)
        if target is not None:
            placed = replace(self._move(placed, target, node), priority=dict.fromkeys(target.axes, Priority.HARD))
        self.placed[node] = (placed,)

    def _place_call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            self._place_item(node)
            return
        call = make_call(node)
        sources = operand_nodes(node)
        if call.name == "meshwright.total.default" and self._total(node, call, sources):
            return
        rule = self._rule(call)
        if self._regroup(node, call, rule, sources):
            return
        operands = [self._best(s) for s in sources]
        keep = bool(operands) and all(p.weight for p in operands) and not rule.reduce
        held = tuple(Held(p.sharding, p.priority, _bytes(s)) for p, s in zip(operands, sources, strict=True))
        decision = self._decide(call, rule, held, self.wanted.get(node, ()), keep)
        moved = [self._move(p, t, node) for p, t in zip(operands, decision.operands, strict=True)]
        copy = self._copy(node, call, moved)
        copy.meta[DECISION] = Chosen(call, rule, decision)
        shardings = decision.results
        self.placed[node] = tuple(
            None if s is None else _Placed(copy, s, _inherit(s, decision.priority), weight=keep) for s in shardings
        )
        if len(shardings) == 1 and shardings[0] is not None:
            self._annotate(copy, node, shardings[0])
            if _is_sum(call) and len(node.users) == 1:
                self._remember_terms(node, sources)

    def _rule(self, call: OpCall) -> Rule:
        """The rule of a call; calls of repeated blocks are equal and share it."""
        key = _key(call)
        if key not in self.rules:
            rule = rule_of(call)
            if rule is None:
                self.warn(f"no rule for {call.name}: it runs on whole operands")
            self.rules[key] = rule or whole_rule(call)
        return self.rules[key]

    def _decide(
        self, call: OpCall, rule: Rule, held: tuple[Held, ...], wanted: tuple[Sharding | None, ...], keep: bool
    ) -> Decision:
        """The decision for a call on operands that lie so; the same question is answered once."""
        lies = tuple((h.sharding, tuple(sorted(h.priority.items())), h.bytes) for h in held)
        key = (_key(call), lies, wanted, keep)
        if key not in self.decisions:
            self.decisions[key] = decide(
                rule,
                held,
                self.mesh,
                wanted=wanted,
                sequence=self.sequence,
                regroups=_is_sum(call) or (len(call.operands) == 1 and not call.pointwise),
                keep_storage=keep,
                whole=self.whole and call.name.startswith("meshwright.einsum"),
            )
        return self.decisions[key]

    def _place_item(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        placed = self.placed[source][index]
        assert placed is not None, f"{node} takes a result that {source} does not return"
        copy = self.new.node_copy(node, lambda n: placed.node)
        self.placed[node] = (replace(placed, node=self._annotate(copy, node, placed.sharding)),)

    def _place_outputs(self) -> None:
        made = []
        for value, node in self.graph.outputs().items():
            if not isinstance(node, fx.Node):
                made.append(node)
                continue
            placed = self._best(node) if value not in self.placement.may_owe else self._only(node)
            target = self.placement.outputs.get(value) or Sharding.whole(placed.sharding.shape)
            if value in self.placement.may_owe:
                target = target.owing(p for p in placed.sharding.partial if p[0] not in target.axes)
            made.append(self._move(placed, target, node, final=True).node)
        self.new.output(tuple(made))

    def _only(self, node: fx.Node) -> _Placed:
        (placed,) = self.placed[node]
        assert placed is not None
        return placed

    def _best(self, node: fx.Node) -> _Placed:
        """The value, or the copy of it whose owed sums have been paid already."""
        placed = self._only(node)
        return self.paid.get(placed.node, placed)

    def _move(self, placed: _Placed, target: Sharding, user: fx.Node, final: bool = False) -> _Placed:
        """The value lying as ``target``, moved once for all readers of the same phase."""
        source, target = placed.sharding.canonical(self.mesh), target.canonical(self.mesh)
        path = [s for s in steps(source, target, self.mesh) if s.kind != "resegment"]
        if not path:
            return placed
        pays = bool(source.owed - target.owed)
        where = "" if pays else _where(user, storage=Priority.STORAGE in placed.priority.values())
        key = (placed.node, target, where)
        if key in self.moved:
            return self.moved[key]
        if any(MICRO in s.axes and s.kind not in ("shard", "owe") for s in path):
            self._refuse_micro(placed.node, user)
        made = self.new.call_function(redistribute, (placed.node, str(source), str(target)))
        note = annotation(placed.node)
        made.meta["val"] = placed.node.meta.get("val")
        made.meta["meshwright"] = replace(
            note, sharding=target, phase=annotation(user).phase, block=annotation(user).block
        )
        priority = {
            a: placed.priority.get(a, Priority.SOFT if a in self.sequence else Priority.HARD) for a in target.axes
        }
        if final:
            # at once, so that a gradient is cut as soon as it is there and the whole one is freed
            placed.node.append(made)
        moved = _Placed(made, target, priority, weight=placed.weight and not final)
        self.moved[key] = moved
        if pays and not target.owed and not final:
            self.paid[placed.node] = moved
        return moved

    def _refuse_micro(self, node: fx.Node, user: fx.Node) -> None:
        raise error(
            "E0305",
            f"{_op_name(user)} needs the whole batch at once, so the step cannot be cut into microbatches",
            annotation(user).origin,
            "use microbatches = 1, or make the loss a sum over samples",
            (f"the value {node.name} couples samples of different microbatches",),
        )

    def _total(self, node: fx.Node, call: OpCall, sources: tuple[fx.Node, ...]) -> bool:
        """Sum scalars group by group of what they owe, so that each owed sum is paid once per group."""
        target = overload(call.name)
        groups: dict[Sharding, list[_Placed]] = {}
        for source in sources:
            placed = self._best(source)
            groups.setdefault(placed.sharding, []).append(placed)
        if len(groups) == 1:
            return False
        parts = []
        for sharding, members in groups.items():
            part = self.new.call_function(target, ([m.node for m in members],))
            part.meta["val"] = node.meta.get("val")
            self._annotate(part, node, sharding)
            part.meta[DECISION] = Chosen(call, whole_rule(call), _trivial(sharding, len(members)))
            parts.append(self._move(_Placed(part, sharding, {}), sharding.paid(), node))
        copy = self.new.call_function(target, ([p.node for p in parts],))
        copy.meta = dict(node.meta)
        scalar = Sharding(())
        copy.meta[DECISION] = Chosen(call, whole_rule(call), _trivial(scalar, len(parts)))
        self.placed[node] = (_Placed(self._annotate(copy, node, scalar), scalar, {}),)
        return True

    def _remember_terms(self, node: fx.Node, sources: tuple[fx.Node, ...]) -> None:
        owing = [self._only(s) for s in sources if self._only(s).sharding.owed]
        paid = [self._only(s) for s in sources if not self._only(s).sharding.owed]
        if len(owing) == len(paid) == 1:
            self.placed[node] = (replace(self._only(node), terms=(paid[0], owing[0])),)

    def _regroup(self, node: fx.Node, call: OpCall, rule: Rule, sources: tuple[fx.Node, ...]) -> bool:
        """``(r + a) + b``, where ``a`` and ``b`` owe the same sums, as ``r + (a + b)``: paid once instead of twice.

        The sum ``r + a`` made before, and its payment, are then read by nobody and fall away.
        """
        if not _is_sum(call):
            return False
        first, second = (self._only(s) for s in sources)
        for whole, owing in ((first, second), (second, first)):
            if whole.terms is None or whole.terms[1].sharding != owing.sharding or not owing.sharding.owed:
                continue
            paid, earlier = whole.terms
            inner = self._sum(node, call, rule, earlier, owing)
            outer = self._sum(node, call, rule, paid, inner)
            self.placed[node] = (replace(outer, terms=(paid, inner) if len(node.users) == 1 else None),)
            return True
        return False

    def _sum(self, node: fx.Node, call: OpCall, rule: Rule, a: _Placed, b: _Placed) -> _Placed:
        size = _bytes(node)
        held = tuple(Held(p.sharding, p.priority, size) for p in (a, b))
        decision = self._decide(call, rule, held, (), keep=False)
        moved = [self._move(p, t, node) for p, t in zip((a, b), decision.operands, strict=True)]
        copy = self._copy(node, call, moved)
        copy.meta[DECISION] = Chosen(call, rule, decision)
        (sharding,) = decision.results
        assert sharding is not None
        return _Placed(self._annotate(copy, node, sharding), sharding, _inherit(sharding, decision.priority))

    def _copy(self, node: fx.Node, call: OpCall, moved: list[_Placed]) -> fx.Node:
        """The node in the new graph, on the operands as they lie now."""
        copy = emit(self.new, unchanged(call), [p.node for p in moved], _no_offset)
        copy.meta = dict(node.meta)
        return copy

    def _annotate(self, copy: fx.Node, original: fx.Node, sharding: Sharding) -> fx.Node:
        copy.meta = dict(copy.meta or original.meta)
        copy.meta["meshwright"] = replace(annotation(original), sharding=sharding)
        return copy


def whole_rule(call: OpCall) -> Rule:
    """The rule of an op that has none: every dim of every operand is needed entire."""
    sizes: dict[str, int] = {}

    def dims(shape: tuple[int, ...], mark: str) -> tuple[tuple[str, ...], ...]:
        names = tuple(f"{mark}_{d}" for d in range(len(shape)))
        sizes.update(zip(names, shape, strict=True))
        return tuple((n,) for n in names)

    operands = tuple(dims(t.shape, f"in{i}") for i, t in enumerate(call.operands))
    results = tuple(None if t is None else dims(t.shape, f"out{i}") for i, t in enumerate(call.results))
    return Rule(sizes, operands, results, whole=frozenset(sizes))


def make_call(node: fx.Node) -> OpCall:
    call = op_call(node)
    assert call is not None, f"{node.format_node()} calls no op"
    return call


def _key(call: OpCall) -> Hashable:
    """What makes two calls the same question: the op and its arguments, tensors by their types."""

    def freeze(value: Any) -> Hashable:
        if isinstance(value, (list, tuple)):
            return tuple(freeze(v) for v in value)
        return (type(value), value) if isinstance(value, (bool, int, float)) else value

    return call.name, freeze(call.args), tuple((k, freeze(v)) for k, v in call.kwargs.items())


def _no_offset(offset: Offset) -> int:
    raise AssertionError(f"a global call has no offset of {offset.factor}")


def _trivial(sharding: Sharding, operands: int) -> Decision:
    return Decision({}, (sharding,) * operands, (sharding,), {})


def _is_sum(call: OpCall) -> bool:
    """Whether the call adds two tensors of the same type, as they are."""
    types = {*call.operands, *call.results}
    return (
        call.name == "aten.add.Tensor"
        and len(call.operands) == 2
        and len(types) == 1
        and call.kwargs.get("alpha", 1) == 1
    )


def _inherit(sharding: Sharding, priority: Mapping[str, Priority]) -> dict[str, Priority]:
    return {a: priority.get(a, Priority.HARD) for a in sharding.axes}


def _where(user: fx.Node, storage: bool) -> str:
    """What shares one moved copy: a phase; for gathered weights, a block of a phase."""
    note = annotation(user)
    return f"{note.phase} {note.block or note.origin.module}" if storage else note.phase


def _bytes(node: fx.Node) -> float:
    note: Annotation = annotation(node)
    return math.prod(note.shape) * (note.dtype.itemsize if note.dtype is not None else 8)


def _op_name(node: fx.Node) -> str:
    target: Any = node.target
    return str(getattr(target, "overloadpacket", getattr(target, "__name__", target)))
