"""Follow rows in sorted order through a graph, and say of every node what it is without the sort."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from meshwright.compiler.graph.adapter import OpOverload
from meshwright.compiler.graph.calls import op_call, operand_nodes
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.rule import Dims, Rule
from meshwright.frontend.capture.constants import constant_nodes
from meshwright.frontend.capture.unsorted.groups import ends_of_groups
from meshwright.frontend.capture.unsorted.places import access, read, write
from meshwright.frontend.capture.unsorted.states import (
    Build,
    Inverse,
    Known,
    Listing,
    Numbers,
    Sorted,
    State,
    arguments,
)
from meshwright.frontend.capture.unsorted.steady import filled_with, steady

aten, ours = torch.ops.aten, torch.ops.meshwright
_SORTS = {aten.sort.default, aten.sort.stable}
_SHAPES = {
    aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.expand.default, aten._to_copy.default,
}  # fmt: skip
"""What leaves numbers as they are."""


class Follow:
    """The states of the nodes of a graph. ``stays``: the sorts that are left alone."""

    def __init__(self, graph: fx.Graph, stays: frozenset[fx.Node]) -> None:
        self._graph, self._stays = graph, stays
        self._constant = constant_nodes(graph)
        self.states: dict[fx.Node, tuple[State | None, ...]] = {}
        """Of the nodes that read rows in sorted order: each result's."""
        self.builds: dict[fx.Node, Build] = {}
        self.lost: set[fx.Node] = set()
        """The sorts of which more is used than the order of rows."""

    def run(self) -> None:
        """Follow all of the graph."""
        for node in self._graph.nodes:
            if node.op == "call_function" and node.target in _SORTS and self._begin(node):
                continue
            met = [s for n in node.all_input_nodes for s in self.states.get(n, ()) if s is not None]
            if not met:
                continue
            known = self._known(node) if node.op == "call_function" else None
            if known is None:
                self.lost |= {s.listing.sort for s in met}
                continue
            self.states[node] = known.states
            if known.build is not None:
                self.builds[node] = known.build

    def _begin(self, node: fx.Node) -> bool:
        """A new listing, or the inverse of one."""
        given = arguments(node)
        keys: fx.Node = given["self"]
        value = keys.meta["val"]
        if node in self._stays or value.dim() != 1 or value.shape[0] < 2:
            return False
        before = self._state(keys)
        if before is None:
            listing = Listing(node, keys, int(value.shape[0]), not given["descending"])
            self.states[node] = (Sorted(listing, 0), Sorted(listing, 0, Numbers()))
            return True
        order = isinstance(before, Sorted) and before.numbers == Numbers() and not given["descending"]
        if not order or any(user.args[1] == 0 for user in node.users):
            return False
        self.states[node] = (None, Inverse(before.listing, 0))
        return True

    def _state(self, node: fx.Node) -> State | None:
        found = self.states.get(node)
        return found[0] if found is not None and len(found) == 1 else None

    def _known(self, node: fx.Node) -> Known | None:
        if node.target is operator.getitem:
            return self._item(node)
        if not isinstance(node.target, OpOverload):
            return None
        number = filled_with(node)
        if number is not None:
            return Known((None,), lambda w: w.filled(node, number))
        if node.target in (ours.grouped_mm.default, ours.grouped_outer.default):
            return self._grouped(node)
        found = access(node)
        if found is not None:
            known = (read if found.values is None else write)(found, self._state, self._constant)
            if known is not None:
                return known
            if found.adds and found.values is not None:
                return self._added(node, found.x, found.index, found.values, found.dim)
        return self._counted_off(node) or self._by_rule(node)

    def _item(self, node: fx.Node) -> Known | None:
        source, number = node.args
        assert isinstance(source, fx.Node) and isinstance(number, int)
        state = self.states[source][number]
        if source.target in _SORTS:
            keys: fx.Node = arguments(source)["self"]
            return Known((state,), (lambda w: w.item(keys)) if number == 0 else None)
        return Known((state,), lambda w: w.call(operator.getitem, w.item(source), number))

    def _grouped(self, node: fx.Node) -> Known | None:
        """A product of sorted rows with the weights of their groups."""
        x, other, ends = node.args
        assert isinstance(x, fx.Node) and isinstance(other, fx.Node) and isinstance(ends, fx.Node)
        rows, outer = self._state(x), node.target is ours.grouped_outer.default
        if not isinstance(rows, Sorted) or rows.dim != 0 or rows.numbers is not None or self._state(ends) is not None:
            return None
        listing = rows.listing
        right = self._state(other)
        groups = int(ends.meta["val"].shape[0])
        aligned = (right == Sorted(listing, 0) or steady(other, 0)) if outer else right is None
        if not aligned or not ends_of_groups(ends, listing, groups, self._true_keys):
            return None
        keys = listing.keys
        if outer:
            target = ours.routed_outer.default
            return Known((None,), lambda w: w.call(target, w.item(x), w.item(other), w.item(keys), groups))
        target = ours.routed_mm.default
        return Known((Sorted(listing, 0),), lambda w: w.call(target, w.item(x), w.item(other), w.item(keys)))

    def _true_keys(self, node: fx.Node) -> fx.Node | None:
        """The keys in true order, of a node that holds them in sorted order."""
        if node not in self.states:
            return None
        if node.target is operator.getitem:
            source, number = node.args
            assert isinstance(source, fx.Node)
            keys: fx.Node | None = arguments(source)["self"] if source.target in _SORTS and number == 0 else None
            return keys
        found = access(node) if isinstance(node.target, OpOverload) else None
        at = self._state(found.index) if found is not None and found.values is None else None
        return found.x if found is not None and isinstance(at, Sorted) and at.numbers == Numbers() else None

    def _added(self, node: fx.Node, x: fx.Node, index: fx.Node, values: fx.Node, dim: int) -> Known | None:
        """Rows added up by what is known of each: gradients of weights that were looked up, counts."""
        at, given = self._state(index), self._state(values)
        if not isinstance(at, Sorted) or at.numbers is not None or self._state(x) is not None:
            return None
        rows = given == Sorted(at.listing, dim) or (given is None and steady(values, dim))
        along = at.dim == (dim if index.meta["val"].dim() > 1 else 0)
        return Known((None,), lambda w: w.again(node)) if rows and along else None

    def _counted_off(self, node: fx.Node) -> Known | None:
        """Numbers of items divided by how many items a row has, and such numbers in another shape."""
        sources = [n for n in node.all_input_nodes if self._state(n) is not None]
        state = self._state(sources[0]) if len(sources) == 1 and len(node.all_input_nodes) == 1 else None
        if state is None or (isinstance(state, Sorted) and state.numbers is None):
            return None
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
            return None
        if node.target in _SHAPES:
            call = op_call(node)
            rule = rule_of(call) if call is not None else None
            factors = rule.operands[0][state.dim] if rule is not None else ()
            result = rule.results[0] if rule is not None else None
            at = [d for d, found in enumerate(result or ()) if found == factors]
            return Known((replace(state, dim=at[0]),), None) if len(factors) == 1 and len(at) == 1 else None
        if not isinstance(state, Sorted) or state.numbers != Numbers():
            return None
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        count = node.args[1] if len(node.args) > 1 else None
        if not isinstance(count, int) or count < 1 or state.listing.size % count:
            return None
        if name == "floor_divide" or (name == "div" and node.kwargs.get("rounding_mode") in ("floor", "trunc")):
            return Known((replace(state, numbers=Numbers(count)),), None)
        if name == "remainder":
            return Known((replace(state, numbers=Numbers(1, count)),), None)
        return None

    def _by_rule(self, node: fx.Node) -> Known | None:
        """An op that goes row by row, or adds rows up: so says its rule."""
        call = op_call(node)
        rule = rule_of(call) if call is not None else None
        if rule is None:
            return None
        listing: Listing | None = None
        factors: set[str] = set()
        operands = operand_nodes(node)
        for source, dims in zip(operands, rule.operands, strict=True):
            state = self._state(source)
            if state is None:
                continue
            if not isinstance(state, Sorted) or state.numbers is not None or len(dims[state.dim]) != 1:
                return None
            if listing is not None and listing is not state.listing:
                return None
            listing, factors = state.listing, factors | set(dims[state.dim])
        if listing is None or len(factors) != 1:
            return None
        (factor,) = factors
        if not _row_by_row(rule, factor) or not self._agree(rule, factor, operands):
            return None
        states: list[State | None] = []
        for result in rule.results:
            at = _places(result or (), factor)
            if len(at) > 1 or (at and result is not None and result[at[0]] != (factor,)):
                return None
            if not at and result is not None and factor not in rule.reduce:
                return None
            states.append(Sorted(listing, at[0]) if at else None)
        return Known(tuple(states), lambda w: w.again(node))

    def _agree(self, rule: Rule, factor: str, operands: tuple[fx.Node, ...]) -> bool:
        """Whether all that has a factor has its rows in the same order there, or all rows alike."""
        for number, (source, dims) in enumerate(zip(operands, rule.operands, strict=True)):
            state = self._state(source)
            for dim in _places(dims, factor):
                ordered = state is not None and state.dim == dim
                if not ordered and number not in rule.unread and not (state is None and steady(source, dim)):
                    return False
        return True


def _row_by_row(rule: Rule, factor: str) -> bool:
    if factor in rule.whole | rule.masked | rule.contiguous or factor in {*rule.aligned, *rule.aligned.values()}:
        return False
    relation = rule.relations.get(factor, "pointwise")
    adds = factor in rule.reduce and not any(r is not None and _places(r, factor) for r in rule.results)
    return relation == "pointwise" or (relation == "all" and adds)


def _places(dims: Dims, factor: str) -> list[int]:
    return [d for d, factors in enumerate(dims) if factor in factors]
