"""Take sums in fp32 that half precision would spoil, and round them once.

A sum over ranks is rewritten so that its partial sums are never rounded: the addends are sent to whoever keeps the sum,
in their own dtype, and added in fp32 (an all-to-all, of as many bytes as a reduce-scatter; an all-reduce gathers the
rounded sums after). Messages too small for that or beyond a node, and addends that are there in fp32 when the plan
reduces in fp32, go as fp32. A cast that stood before the sum stands after it, one to fp32 that followed it falls away,
and of two sums that follow each other the second takes the first one's fp32.

Sums within a rank follow in :mod:`meshwright.compiler.passes.widen_accumulators`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.program import Graph, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.numerics.averages import factor
from meshwright.compiler.numerics.casts import CAST, HALVES, dtype_of, half, is_view, narrows, shape_of, widens
from meshwright.compiler.numerics.rank_sums import MOST, RankSum, rank_sums
from meshwright.compiler.passes.widen_accumulators import widen_accumulators
from meshwright.compiler.plan import HALVES as HALF_NAMES
from meshwright.compiler.plan import Plan

LEAST_PART = 4096
"""Bytes for each peer from which an all-reduce is worth two messages; smaller ones are sent in fp32."""
NODE = 8
"""Ranks that are taken to lie in one node. Between nodes an all-to-all sends every addend over the links of a node,
where a reduce-scatter sends sums of what its members have, so that fp32 takes fewer bytes there: on 2 nodes of 8 H100
the simulator gives 2.35 ms instead of 2.67 ms, where half precision takes 2.09 ms."""
WIDE = torch.float32


@dataclass(frozen=True)
class Widening:
    """What a plan says of how sums are widened."""

    adds_wide: bool
    """Whether gradients are added up in fp32 over several microbatches."""
    given_wide: frozenset[str] = frozenset()
    """The gradients that the update gets in fp32: all of several microbatches, and the next ones."""
    summed_wide: frozenset[str] = frozenset()
    """Those that left ``micro`` as a sum in fp32 over some ranks."""
    sends_half: bool = False
    """Whether the plan wants gradients sent in half precision."""


def widening_of(plan: Plan) -> Widening | None:
    """How the sums of a plan are widened; None where its ``numerics`` leaves them as they are."""
    if plan.numerics != "safe":
        return None
    return Widening(plan.microbatches > 1, sends_half=plan.precision.reduce in HALF_NAMES)


def widen_reductions(local: LocalGraph, mesh: Mesh, how: Widening) -> LocalGraph:
    """The same graph with its sums in half precision widened.

    Needs shapes in ``meta["val"]``; those of new nodes are left to :func:`verify_shapes`.
    """
    graph = local.module.graph
    taken = _take_wide_totals(local, how.given_wide)
    widen_accumulators(graph)
    found = _Sums(graph, mesh, how)
    found.wide |= {low: node for name, (node, low) in taken.items() if name in how.summed_wide}
    for one in [s for s in rank_sums(graph, mesh) if half(s.source)]:
        found.widen(one)
    _give_wide_parts(local, found.wide)
    graph.eliminate_dead_code()
    graph.lint()
    local.module.recompile()
    return local


def for_update(how: Widening, graph: Graph, local: LocalGraph) -> Widening:
    """The same for an update, with the gradients that it gets in fp32 though ``graph``, whose form for a rank is
    ``local``, gives them in half precision."""
    halves, sums = set(), set()
    wide = dict(zip(local.signature.outputs, _returned(local.module.graph), strict=True))
    for value, node in graph.outputs().items():
        if value.kind == "gradient" and isinstance(node, fx.Node) and half(node):
            made = wide[value]
            halves.add(value.name)
            if isinstance(made, fx.Node) and dtype_of(made) == WIDE:
                sums.add(value.name)
    return replace(how, given_wide=frozenset(halves if how.adds_wide else sums), summed_wide=frozenset(sums))


def _returned(graph: fx.Graph) -> tuple[Any, ...]:
    (output,) = graph.find_nodes(op="output")
    values: Any = output.args[0]
    return tuple(values)


def _take_wide_totals(local: LocalGraph, names: frozenset[str]) -> dict[str, tuple[fx.Node, fx.Node]]:
    """Let an update take gradients in fp32, and round them itself. Returns each as it is taken and as it is rounded."""
    graph = local.module.graph
    taken = {}
    for node, value in zip(graph.find_nodes(op="placeholder"), local.signature.inputs, strict=True):
        dtype = dtype_of(node)
        if value.kind == "gradient" and value.name in names and dtype in HALVES and node.users:
            users = list(node.users)
            low = _cast_after(node, dtype)
            node.meta["val"] = node.meta["val"].to(WIDE)
            annotation(node).dtype = WIDE
            for user in users:
                if user.target is CAST and dtype_of(user) == WIDE:
                    user.replace_all_uses_with(node)
                else:
                    user.replace_input_with(node, low)
            taken[value.name] = node, low
    return taken


def _give_wide_parts(local: LocalGraph, wide: Mapping[fx.Node, fx.Node]) -> None:
    """Let gradients leave in fp32 that are summed in it: they are summed further."""
    (output,) = local.module.graph.find_nodes(op="output")
    roles = zip(_returned(local.module.graph), local.signature.outputs, strict=True)
    output.args = (tuple(wide.get(node, node) if value.kind == "gradient" else node for node, value in roles),)


@dataclass
class _Sums:
    graph: fx.Graph
    mesh: Mesh
    how: Widening

    def __post_init__(self) -> None:
        self.wide: dict[fx.Node, fx.Node] = {}
        """By value in half precision: what it was rounded from."""

    def widen(self, one: RankSum) -> None:
        (given,) = one.node.all_input_nodes  # an earlier sum may have been replaced since
        one = replace(one, source=given)
        narrow = dtype_of(given)
        if narrow is not None and one.count > MOST and factor(given) is not None and set(given.users) == {one.node}:
            self._divide_after(one, given, narrow)
            return
        source = self._wide(given, one.node)
        if narrow is None or (source is None and one.count <= MOST and not self._is_summed_further(one.node)):
            return
        small = one.kind == "all-reduce" and one.elements * narrow.itemsize < LEAST_PART * one.count
        if source is None and (small or self._reaches_far(one.axes)):
            source = _before_rounding(given) or self._cast(given, one.node, WIDE)
        if source is not None:
            with self.graph.inserting_before(one.node):
                arguments: tuple[Any, ...] = one.node.args
                made = self._like(one.node, one.node.target, (source, *arguments[1:]), WIDE)
            self._round(one.node, made, narrow)
        elif one.kind == "reduce-scatter":
            self._send_addends(one, narrow)
        else:
            self._send_and_gather(one, narrow)

    def _reaches_far(self, axes: tuple[str, ...]) -> bool:
        """Whether a group has members beyond a node."""
        group = self.mesh.group(0, axes)
        return max(group) - min(group) >= NODE

    def _is_summed_further(self, node: fx.Node) -> bool:
        """Whether the sum is a part of one over further ranks, or microbatches."""
        sharding = annotation(node).sharding
        return sharding is not None and any(self.mesh.size(axis) > 1 for axis in sharding.owed)

    def _divide_after(self, one: RankSum, average: fx.Node, narrow: torch.dtype) -> None:
        """Sum what is averaged, and divide the sum before it is rounded, where it is there in fp32."""
        one.node.replace_input_with(average, average.all_input_nodes[0])
        with self.graph.inserting_after(one.node):
            divided = self._like(one.node, average.target, (one.node, *average.args[1:]), narrow, average.kwargs)
        one.node.replace_all_uses_with(divided, delete_user_cb=lambda user: user is not divided)
        self.widen(one)
        (total,) = divided.all_input_nodes
        if total in self.wide:
            divided.replace_input_with(total, self.wide[total])
            annotation(divided).dtype = WIDE
            readers = list(divided.users)
            low = self._cast(divided, min(readers), narrow)
            for reader in readers:
                reader.replace_input_with(divided, low)
            self.wide[low] = divided

    def _send_addends(self, one: RankSum, narrow: torch.dtype) -> None:
        """Whoever reads the sum in fp32 gets it as it was added."""
        with self.graph.inserting_before(one.node):
            arguments: tuple[Any, ...] = one.node.args
            made = self._like(one.node, collectives.reduce_scatter_wide, (*arguments[:3], WIDE), WIDE)
        self._round(one.node, made, narrow)

    def _send_and_gather(self, one: RankSum, narrow: torch.dtype) -> None:
        shape = list(shape_of(one.source))
        reshape = torch.ops.aten.reshape.default
        with self.graph.inserting_before(one.node):
            flat = self._within(one.node, reshape, (one.source, [one.elements]))
            # a sum that fits in no fp16 is gathered as it is
            kept = WIDE if narrow == torch.float16 else narrow
            sums = self._within(one.node, collectives.reduce_scatter_wide, (flat, 0, one.axes, kept))
            whole = self._within(one.node, collectives.all_gather, (sums, 0, one.axes, one.elements))
            made = self._like(one.node, reshape, (whole, shape), kept)
        if kept == WIDE:
            self._round(one.node, made, narrow)
        else:
            one.node.replace_all_uses_with(made)

    def _round(self, before: fx.Node, made: fx.Node, narrow: torch.dtype) -> None:
        """Let ``made``, in fp32, stand for ``before``, which was in half precision. It is rounded where it is first
        read, so that messages beside it can be joined with it."""
        low = self._cast(made, min(before.users, default=before), narrow)
        low.meta["meshwright"] = replace(annotation(before), dtype=narrow)
        before.replace_all_uses_with(low)
        self.wide[low] = made
        for user in list(low.users):
            if widens(user) and user.kwargs.get("dtype") == WIDE:
                user.replace_all_uses_with(made)

    def _wide(self, node: fx.Node, reader: fx.Node) -> fx.Node | None:
        """The value before it was rounded, if a sum should rather be taken of that."""
        if node in self.wide:
            return self.wide[node]
        if _is_total(node, reader) and not self.how.sends_half:
            return _before_rounding(node)
        if is_view(node) and len(node.users) == 1:
            inner = self._wide(node.all_input_nodes[0], node)
            if inner is not None:
                with self.graph.inserting_before(node):
                    return self._like(node, node.target, (inner, *node.args[1:]), WIDE, node.kwargs)
        return None

    def _cast(self, node: fx.Node, before: fx.Node, dtype: torch.dtype) -> fx.Node:
        with self.graph.inserting_before(before):
            made = self.graph.call_function(CAST, (node,), {"dtype": dtype})
        made.meta = {"meshwright": replace(annotation(node), dtype=dtype)}
        return made

    def _like(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], dtype: torch.dtype, kwargs: Any = None
    ) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {"meshwright": replace(annotation(node), dtype=dtype)}
        return made

    def _within(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """A step on the way to the value of ``node``, which lies in no way that a sharding says."""
        made = self.graph.call_function(target, args)
        made.meta = {"meshwright": replace(annotation(node), shape=(), dtype=None, sharding=None)}
        return made


def _before_rounding(node: fx.Node) -> fx.Node | None:
    """What a value in half precision was cast from, if it was in fp32."""
    source = node.args[0] if narrows(node) else None
    return source if isinstance(source, fx.Node) and dtype_of(source) == WIDE else None


def _is_total(cast: fx.Node, reader: fx.Node) -> bool:
    """Whether a cast only rounds a gradient on its way into the sum that the update takes of it."""
    return annotation(cast).phase == "update" and set(cast.users) == {reader}


def _cast_after(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A cast of an input of the update after all inputs; its readers are left as they are."""
    place = node
    while place.next.op == "placeholder":
        place = place.next
    with node.graph.inserting_after(place):
        made = node.graph.call_function(CAST, (node,), {"dtype": dtype})
    block = next((annotation(u).block for u in node.users if annotation(u).block), "")
    made.meta = {"meshwright": replace(annotation(node), dtype=dtype, phase="update", block=block)}
    return made
