"""Give every value of a graph its sharding, and make every change of sharding explicit.

FX in, FX out: the result computes the same on one device, with ``redistribute`` nodes where a
value has to lie differently and an :class:`Annotation` with its sharding on every node.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from meshwright.compiler.graph.adapter import graph_module
from meshwright.compiler.graph.calls import emit, operand_nodes
from meshwright.compiler.graph.program import Graph, Value, annotation
from meshwright.compiler.mesh import MICRO, Mesh, Sharding
from meshwright.compiler.passes.declared import NOTHING, Meanings
from meshwright.compiler.passes.moves import Moves
from meshwright.compiler.passes.placement import DECISION, Chosen, Placed, Placement
from meshwright.compiler.passes.proposals import Held, Priority
from meshwright.compiler.passes.questions import Questions, Warn, call_of, is_sum, widens
from meshwright.compiler.passes.sums import regrouped, terms_of, total_by_groups
from meshwright.compiler.passes.wanted import wanted_shardings
from meshwright.compiler.rules.arguments import unchanged
from meshwright.compiler.rules.rule import Offset, OpCall


def propagate(
    graph: Graph,
    mesh: Mesh,
    placement: Placement,
    *,
    sequence: frozenset[str] = frozenset(),
    whole_contractions: bool = False,
    warn: Warn | None = None,
    meanings: Meanings = NOTHING,
) -> Graph:
    """Propagate shardings from the placement of the inputs through the graph.

    ``sequence`` are the axes of sequence sharding. ``whole_contractions`` runs every contraction on
    whole operands (optimizers with whole-matrix rules). ``warn`` is told of ops without a rule. ``meanings``: what
    is declared of ops that couple samples. Raises E0305 when a value would have to be reduced or gathered over
    microbatches where nothing is.
    """
    questions = Questions(mesh, sequence, whole_contractions, warn or (lambda text: None))
    return _Propagation(graph, mesh, placement, questions, Moves(fx.Graph(), mesh, sequence, meanings), sequence).run()


class _Propagation:
    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        placement: Placement,
        questions: Questions,
        moves: Moves,
        sequence: frozenset[str],
    ) -> None:
        self.graph = graph
        self.placement = placement
        self.questions = questions
        self.new = moves.graph
        self.moves = moves
        self.sequence = sequence
        self.placed: dict[fx.Node, tuple[Placed | None, ...]] = {}
        self.wanted = wanted_shardings(graph, mesh, placement.wanted)

    def run(self) -> Graph:
        roles = {node: value for value, node in self.graph.placeholders().items()}
        for node in self.graph.module.graph.nodes:
            if node.op == "placeholder":
                self._place_input(node, roles[node])
        for node in self.graph.module.graph.nodes:
            if node.op == "call_function":
                self.placed[node] = self._place_call(node)
            elif node.op == "output":
                self._place_outputs()
        return Graph(graph_module(self.graph.module, self.new), self.graph.signature)

    def _place_input(self, node: fx.Node, value: Value) -> None:
        copy = self.new.node_copy(node)
        sharding = self.placement.inputs.get(value) or Sharding.whole(annotation(node).shape)
        stored = self.placement.storage.get(value, frozenset())
        priority = {a: Priority.STORAGE if a in stored else Priority.HARD for a in sharding.axes}
        weight, owed_in = value.kind == "parameter", _element(node) if sharding.owed else 0
        placed = Placed(_annotate(copy, node, sharding), sharding, priority, weight=weight, owed_in=owed_in)
        target = self.placement.early.get(value)
        if target is not None:
            # it belongs to the block of whoever reads it first
            reader = next((u for u in node.users if annotation(u).block), node)
            placed = replace(
                self.moves.move(placed, target, reader), priority=dict.fromkeys(target.axes, Priority.HARD)
            )
        self.placed[node] = (placed,)

    def _place_call(self, node: fx.Node) -> tuple[Placed | None, ...]:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return (self._place_item(node),)
        call, sources = call_of(node), operand_nodes(node)
        operands = [self.moves.paid(self._only(s), node) for s in sources]
        if widens(node, call) or self._loses(node, call, operands):
            operands = [self._paid_before(p, node) for p in operands]
        if call.name == "meshwright.total.default":
            total = total_by_groups(self.new, call, node, operands, self.moves, lambda n, s: _annotate(n, node, s))
            if total is not None:
                self.moves.derive(total.node, total.node.all_input_nodes, (total.sharding,))
                return (total,)
        alone = len(node.users) == 1
        if is_sum(call):
            first, second = operands
            found = regrouped(first, second, lambda a, b: self._place_sum(node, call, a, b))
            if found is not None:
                return (found if alone else replace(found, terms=None),)
        made = self._place_op(node, call, sources, operands)
        if is_sum(call) and alone and made[0] is not None:
            return (replace(made[0], terms=terms_of(operands)),)
        return made

    def _loses(self, node: fx.Node, call: OpCall, operands: list[Placed]) -> bool:
        """Whether a call casts addends to fewer bytes than they were made in, so that their sum would be taken in a
        dtype in which no addend was meant to be. Gradients are cast to the dtype in which the plan wants their sums."""
        if call.name != "aten._to_copy.default" or all(user.op == "output" for user in node.users):
            return False
        return operands[0].owed_in > _element(node)

    def _paid_before(self, placed: Placed, user: fx.Node) -> Placed:
        """The value without what it owes over axes of ranks, except where it is to be scattered along time."""
        target = Sharding(placed.sharding.dims, frozenset(p for p in placed.sharding.partial if p[0] == MICRO))
        if target == placed.sharding or placed.sharding.owed & self.sequence:
            return placed
        return self.moves.move(placed, target, user)

    def _place_op(
        self, node: fx.Node, call: OpCall, sources: tuple[fx.Node, ...], operands: list[Placed]
    ) -> tuple[Placed | None, ...]:
        """The op on its operands, each brought into the sharding that the op wants."""
        rule = self.questions.rule(call)
        operands = self.moves.unmixed(operands, rule, node)
        # casts and views of stored weights are done on the stored shards, and gathered after
        keep = bool(operands) and all(p.weight for p in operands) and not rule.reduce
        held = tuple(Held(p.sharding, p.priority, _bytes(s)) for p, s in zip(operands, sources, strict=True))
        decision = self.questions.decision(call, held, self.wanted.get(node, ()), keep, widens(node, call))
        moved = [self.moves.move(p, t, node).node for p, t in zip(operands, decision.operands, strict=True)]
        copy = emit(self.new, unchanged(call), moved, _no_offset)
        copy.meta = {**node.meta, DECISION: Chosen(call, rule, decision)}
        if len(decision.results) == 1 and decision.results[0] is not None:
            _annotate(copy, node, decision.results[0])
        self.moves.derive(copy, moved, decision.results)
        owed_in = (
            min((p.owed_in for p in operands if p.owed_in), default=_element(node)) if operands else _element(node)
        )
        return tuple(
            None
            if s is None
            else Placed(
                copy,
                s,
                _inherit(s, decision.priority),
                weight=keep,
                owed_in=min(owed_in, _element(node)) if s.owed else 0,
            )
            for s in decision.results
        )

    def _place_sum(self, node: fx.Node, call: OpCall, a: Placed, b: Placed) -> Placed:
        (made,) = self._place_op(node, call, (node, node), [a, b])
        assert made is not None
        return made

    def _place_item(self, node: fx.Node) -> Placed:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        placed = self.placed[source][index]
        assert placed is not None, f"{node} takes a result that {source} does not return"
        copy = self.new.node_copy(node, lambda n: placed.node)
        _annotate(copy, node, placed.sharding)
        self.moves.derive(copy, [placed.node], (placed.sharding,))
        return replace(placed, node=copy)

    def _place_outputs(self) -> None:
        made = []
        for value, node in self.graph.outputs().items():
            if not isinstance(node, fx.Node):
                made.append(node)
                continue
            may_owe = value in self.placement.may_owe
            placed = self._only(node) if may_owe else self.moves.paid(self._only(node), node)
            placed = self.moves.mean_of_groups(placed)
            target = self.placement.outputs.get(value) or Sharding.whole(placed.sharding.shape)
            if value.kind == "buffer":
                # microbatches read it as it was when the step began, so it may be added up to the end of the step
                target = target.owing(p for p in placed.sharding.partial if p[0] == MICRO)
            if may_owe:
                owed = [p for p in placed.sharding.partial if p[0] not in target.axes]
                pays = self.placement.pays.get(value, frozenset()).issuperset(axis for axis, _ in owed)
                target = target if pays else target.owing(owed)
            made.append(self.moves.move(placed, target, node, final=True).node)
        self.new.output(tuple(made))

    def _only(self, node: fx.Node) -> Placed:
        (placed,) = self.placed[node]
        assert placed is not None
        return placed


def _annotate(copy: fx.Node, original: fx.Node, sharding: Sharding) -> fx.Node:
    copy.meta = dict(copy.meta or original.meta)
    copy.meta["meshwright"] = replace(annotation(original), sharding=sharding)
    return copy


def _no_offset(offset: Offset) -> int:
    raise AssertionError(f"a global call has no offset of {offset.factor}")


def _inherit(sharding: Sharding, priority: Mapping[str, Priority]) -> dict[str, Priority]:
    return {a: priority.get(a, Priority.HARD) for a in sharding.axes}


def _element(node: fx.Node) -> int:
    """The bytes of an element; of several results, of the first."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    dtype = getattr(first, "dtype", None) or annotation(node).dtype
    return dtype.itemsize if dtype is not None else 8


def _bytes(node: fx.Node) -> float:
    note = annotation(node)
    return math.prod(note.shape) * (note.dtype.itemsize if note.dtype is not None else 8)
