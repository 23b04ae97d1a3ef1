"""The logical axes of a traced program: which dims of which tensors are the same thing.

Every dim of every tensor is a product of *atoms*. Each op's rule says which dims share a factor, so
atoms are united, and split where a view shows finer structure: after ``[b, t, h*c] -> [b, t, h, c]``
the rows of the projection before it are known to be ``h c``. Named axes of a ``.mw`` file come out of
this for any model, and so do head counts, the batch, and what may be cut by tensor parallelism.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch import fx

from meshwright.compiler.graph.calls import op_call, operand_nodes
from meshwright.compiler.graph.program import Graph, Value, annotation
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.rule import Rule


@dataclass(eq=False)
class Atom:
    """A logical axis, or a stand-in for one (``same``) or for several (``parts``)."""

    size: int
    same: Atom | None = None
    parts: list[Atom] = field(default_factory=list)
    roles: set[str] = field(default_factory=set)
    """``whole`` (some kernel needs it entire), ``lookup`` (a table is read along it by values of the batch),
    ``logits`` (a softmax or its loss runs over it in pieces), ``head`` (an attention passes it, be it one op or
    written as products of activations), ``batch``."""


class Axes:
    """The atoms of every value of a graph."""

    def __init__(self) -> None:
        self._dims: dict[fx.Node, list[list[Atom]]] = {}
        self._from_batch: set[fx.Node] = set()

    def of(self, node: fx.Node) -> list[list[Atom]]:
        """Per dim the atoms of a value, major to minor."""
        return [_leaves(dim) for dim in self._dims[node]]


def infer_axes(graph: Graph, batch_dims: dict[str, int | None], phase: str = "forward") -> Axes:
    """Infer the logical axes of the nodes of one phase of a graph (placeholders included)."""
    axes = Axes()
    results: dict[tuple[fx.Node, int], list[list[Atom]]] = {}
    for value, node in graph.placeholders().items():
        axes._dims[node] = [[Atom(n)] for n in annotation(node).shape]
        _mark_batch(value, axes._dims[node], batch_dims)
        if value.kind == "batch":
            axes._from_batch.add(node)
    for node in graph.module.graph.nodes:
        if node.op != "call_function" or annotation(node).phase != phase:
            continue
        if any(n in axes._from_batch for n in node.all_input_nodes):
            axes._from_batch.add(node)
        if node.target is operator.getitem:
            source, index = node.args
            if (source, index) in results:
                axes._dims[node] = results[source, index]
            continue
        _infer_call(node, axes, results)
    return axes


def _mark_batch(value: Value, dims: list[list[Atom]], batch_dims: dict[str, int | None]) -> None:
    dim = batch_dims.get(value.name) if value.kind == "batch" else None
    if dim is not None:
        dims[dim][0].roles.add("batch")


def _infer_call(node: fx.Node, axes: Axes, results: dict[tuple[fx.Node, int], list[list[Atom]]]) -> None:
    call = op_call(node)
    if call is None:
        return
    rule = rule_of(call)
    if rule is None:
        for k, result in enumerate(call.results):
            results[node, k] = [[Atom(n, roles={"whole"})] for n in (result.shape if result else ())]
        axes._dims[node] = results[node, 0]
        return
    factors = {f: Atom(n) for f, n in rule.sizes.items()}
    for factor in rule.whole:
        factors[factor].roles.add("whole")
    indices = [n for n, t in zip(operand_nodes(node), call.operands, strict=True) if t.dtype in ("i64", "i32")]
    if any(n in axes._from_batch for n in indices):
        for factor in rule.masked:
            factors[factor].roles.add("lookup")
    for factor, reduction in rule.reduce.items():
        if reduction == "logsumexp":
            factors[factor].roles.add("logits")
    if call.name.startswith("meshwright.attention") and rule.results[0] is not None:
        for factor in rule.results[0][1]:
            factors[factor].roles.add("head")
    for factor, role in _of_activations(node, rule, axes).items():
        factors[factor].roles.add(role)
    for source, dims in zip(operand_nodes(node), rule.operands, strict=True):
        if source not in axes._dims:
            continue
        for atoms, names in zip(axes._dims[source], dims, strict=True):
            unite(atoms, [factors[f] for f in names])
    for k, dims_or_none in enumerate(rule.results):
        if dims_or_none is not None:
            results[node, k] = [[factors[f] for f in names] for names in dims_or_none]
    axes._dims[node] = results.get((node, 0), [])


def _of_activations(node: fx.Node, rule: Rule, axes: Axes) -> dict[str, str]:
    """The roles of factors of a product of two activations that share more than the batch: what they share are heads,
    and what is summed is not to be cut, since the result is larger than what it is made of."""
    sources = operand_nodes(node)
    if len(sources) != 2 or not rule.reduce or rule.results[0] is None or not axes._from_batch.issuperset(sources):
        return {}
    if not all(source in axes._dims for source in sources):
        return {}
    found = {}
    result = {f for names in rule.results[0] for f in names}
    second = {f for names in rule.operands[1] for f in names}
    for atoms, names in zip(axes._dims[sources[0]], rule.operands[0], strict=True):
        if set(names) <= result & second and any("batch" not in a.roles for a in _leaves(atoms)):
            found.update(dict.fromkeys(names, "head"))
    return {**found, **dict.fromkeys(rule.reduce, "whole")} if found else {}


def _leaves(atoms: list[Atom]) -> list[Atom]:
    found: list[Atom] = []
    for atom in atoms:
        while atom.same is not None:
            atom = atom.same
        found.extend(_leaves(atom.parts) if atom.parts else [atom] if atom.size > 1 else [])
    return found


def unite(a: list[Atom], b: list[Atom]) -> None:
    """Two products of atoms are the same dim. Where the sizes share no common refinement, nothing is learned."""
    left, right = _leaves(a), _leaves(b)
    while left and right:
        x, y = left.pop(0), right.pop(0)
        if x is y:
            continue
        if x.size == y.size:
            y.roles |= x.roles
            x.same = y
        elif x.size % y.size == 0:
            left[:0] = _divide(x, y.size)
            right.insert(0, y)
        elif y.size % x.size == 0:
            right[:0] = _divide(y, x.size)
            left.insert(0, x)
        else:
            return


def _divide(atom: Atom, major: int) -> list[Atom]:
    atom.parts = [Atom(major, roles=set(atom.roles)), Atom(atom.size // major, roles=set(atom.roles))]
    return atom.parts
