"""The step for one device as terms: what every value of its three graphs is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.equivalence.meaning import SAME, TOTAL, adds, cast_to, is_item, is_view
from meshwright.compiler.equivalence.terms import Known, Terms
from meshwright.compiler.graph.calls import op_call, operand_nodes
from meshwright.compiler.graph.program import Graph, StepProgram, Value, annotation
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.dims import all_whole


@dataclass
class Meaning:
    """The terms of a step, and which of them its outputs are."""

    terms: Terms = field(default_factory=Terms)
    outputs: dict[Value, int] = field(default_factory=dict)
    """Of all three graphs. What one graph hands to the next is no input of that."""
    shapes: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    of: dict[fx.Node, Any] = field(default_factory=dict)
    """By node of the step for one device: its term, or those of its results."""
    _alike: dict[Hashable, list[Known]] = field(default_factory=dict)

    def like(self, node: fx.Node, op: str) -> list[Known]:
        """The calls of an op that the step for one device makes where a node of a rank's program comes from."""
        if not self._alike:
            for calls in self.terms.calls.values():
                for known in calls:
                    self._alike.setdefault(_place(known.node, known.call.name), []).append(known)
        return self._alike.get(_place(node, op), [])


def meaning_of(program: StepProgram) -> Meaning:
    """Read a step."""
    found = Meaning()
    for graph in (program.prologue, program.micro, program.update):
        _read(graph, found)
    return found


def first_difference(
    meaning: Meaning, program: StepProgram, copies: Mapping[str, str]
) -> tuple[Value, str, str, str] | None:
    """The first result of a step made of another one that is not what it was: the result, the first node that gives a
    new value on the way to it, what it is, what it was. ``copies``: further copies of parameters, with their names."""
    found = Meaning(meaning.terms)
    names: dict[fx.Node, int] = {}
    known = len(meaning.terms.names)
    for graph in (program.prologue, program.micro, program.update):
        for node in _read(graph, found, copies):
            names[node] = found.of[node]
    terms = meaning.terms
    for value, was in meaning.outputs.items():
        parts = [found.outputs[value]] if value in found.outputs else []
        if value.kind == "gradient":
            parts += [t for v, t in found.outputs.items() if v.kind == "gradient" and copies.get(v.name) == value.name]
        if not parts or terms.sum(parts) != was:
            now = terms.names[terms.sum(parts)] if parts else "nothing"
            first = next((n.name for n, t in names.items() if isinstance(t, int) and t >= known), "")
            return value, first, now, terms.names[was]
    return None


def _read(graph: Graph, into: Meaning, copies: Mapping[str, str] | None = None) -> list[fx.Node]:
    """Read a graph; its nodes, in order."""
    given = dict(into.outputs)
    env = into.of
    for value, node in graph.placeholders().items():
        handed_on = value in given and value.kind in ("prologue", "gradient")
        if value.kind == "parameter" and copies and value.name in copies:
            value = replace(value, name=copies[value.name])
        env[node] = given[value] if handed_on else into.terms.leaf(value)
        into.terms.made_by.setdefault(env[node], node)
        if node.meta["val"].dtype.is_floating_point:
            into.terms.real.add(env[node])
    for node in graph.module.graph.nodes:
        if node.op == "call_function":
            env[node] = _term(node, env, into.terms)
        elif node.op not in ("placeholder", "output"):
            raise InternalError(f"equivalence: {node} of the step for one device is a {node.op}")
    for value, made in graph.outputs().items():
        if isinstance(made, fx.Node):
            into.outputs[value] = env[made]
            into.shapes[value] = _shape(made)
    return [n for n in graph.module.graph.nodes if n.op == "call_function"]


def _term(node: fx.Node, env: Mapping[fx.Node, Any], terms: Terms) -> Any:
    if is_item(node):
        source, index = node.args
        return env[source][index]  # type: ignore[index]  # what getitem reads is several
    call = op_call(node)
    if call is None:
        raise InternalError(f"equivalence: {node} of the step for one device calls {node.target}")
    operands = operand_nodes(node)
    if operands and (node.target in SAME or is_view(node.target) or _keeps_value(node, call)):
        return env[operands[0]]
    if adds(node) and _shape(operands[0]) == _shape(operands[1]):
        return terms.sum([env[n] for n in operands], node.name)
    if call.name == TOTAL:
        return terms.sum([env[n] for n in operands], node.name)
    rule = rule_of(call) or all_whole(call)
    results = terms.learn(call, rule, tuple(env[n] for n in operands), node)
    return results if isinstance(node.meta.get("val"), (list, tuple)) else results[0]


def _keeps_value(node: fx.Node, call: Any) -> bool:
    """Whether a cast goes from one float to another, which over the reals changes nothing."""
    if cast_to(node) is None and call.name != "aten._to_copy.default":
        return False
    types = {t.dtype for t in (*call.operands, *call.results) if t is not None}
    return len(types) == 1 or all(t.startswith(("f", "bf")) for t in types)


def _place(node: fx.Node, op: str) -> Hashable:
    """Where a call stands, as far as it is the same in the program of a rank."""
    note = annotation(node)
    return op, note.block, note.phase if not note.recomputed else "forward", note.origin


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return tuple(int(n) for n in value.shape)
