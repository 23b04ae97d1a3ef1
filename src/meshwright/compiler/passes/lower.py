"""From an annotated global graph to the graph that one rank runs.

Every op is called with the local sizes of its shard; every ``redistribute`` becomes the collectives of
its path. Padding is filled with the neutral element before anything is reduced across it.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import replace

from torch import fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.adapter import graph_module
from meshwright.compiler.graph.calls import emit, operand_nodes
from meshwright.compiler.graph.program import Graph, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.graph.redistribute import moves, redistribute
from meshwright.compiler.mesh import MICRO, Mesh, Segment, Sharding
from meshwright.compiler.mesh_paths import Step, steps
from meshwright.compiler.passes.placement import DECISION, Chosen
from meshwright.compiler.rules.arguments import unchanged
from meshwright.compiler.rules.rule import Offset, Shards


def lower(graph: Graph, mesh: Mesh) -> LocalGraph:
    """Lower a propagated graph. The mesh has the ``micro`` axis in front where the graph is ``micro``."""
    return _Lowering(graph, mesh).run()


class _Lowering:
    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.graph = graph
        self.mesh = mesh
        self.new = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.offsets: dict[tuple[tuple[str, int], ...], fx.Node] = {}
        self.filled: dict[tuple[fx.Node, str], fx.Node] = {}
        self.meeting: dict[fx.Node, Sharding] = {}
        """How what microbatches meet with lies: a pipeline hands it from one pass to the next."""

    def run(self) -> LocalGraph:
        for node in self.graph.module.graph.nodes:
            known = len(self.new.nodes)
            if node.op == "call_function":
                self.env[node] = self._call(node)
            else:
                self.env[node] = self.new.node_copy(node, self.env.__getitem__)
            self._annotate(node, len(self.new.nodes) - known)
        self.new.eliminate_dead_code()
        inputs = {v: _sharding(n) for v, n in self.graph.placeholders().items()}
        outputs = {v: _sharding(n) for v, n in self.graph.outputs().items() if isinstance(n, fx.Node)}
        module = graph_module(self.graph.module, self.new)
        return LocalGraph(module, self.graph.signature, inputs, outputs)

    def _annotate(self, node: fx.Node, made: int) -> None:
        """Tell the nodes just made for ``node`` where they come from, and the last one how it lies."""
        note = annotation(node)
        for local in itertools.islice(reversed(self.new.nodes), made):
            lies = self.meeting.get(local)
            shape = () if lies is None else lies.local_shape(self.mesh)
            local.meta = {"meshwright": replace(note, shape=shape, sharding=lies)}
        if note.sharding is not None and made:
            shape = note.sharding.local_shape(self.mesh)
            self.env[node].meta = {"meshwright": replace(note, shape=shape)}

    def _call(self, node: fx.Node) -> fx.Node:
        if node.target is redistribute:
            x, source, target = moves(node)
            return self._redistribute(self.env[x], source, target)
        chosen = node.meta.get(DECISION)
        if node.target is operator.getitem or chosen is None:
            return self.new.node_copy(node, self.env.__getitem__)
        return self._op(node, chosen)

    def _redistribute(self, x: fx.Node, source: Sharding, target: Sharding) -> fx.Node:
        for step in steps(source, target, self.mesh):
            # one rank along the axes holds the whole chunk and owes nothing to anyone
            if step.kind != "resegment" and self.mesh.size(*step.axes) > 1:
                if MICRO in step.axes and not x.meta:
                    self.meeting[x] = step.before
                x = self._step(x, step)
        return x

    def _step(self, x: fx.Node, step: Step) -> fx.Node:
        if step.kind == "all_reduce":
            return self.new.call_function(collectives.all_reduce, (x, step.axes, step.reduction))
        if step.kind == "owe":
            return self.new.call_function(collectives.owe, (x, step.axes))
        d, i = step.dim, step.segment
        involved = {d, step.other[0]} if step.kind == "all_to_all" else {d}
        expand = any(len(step.before.dims[k]) > 1 for k in involved)
        if expand:
            x = self._reshape(x, step.before.expanded_shape(self.mesh))
            if MICRO in step.axes:
                apart = tuple((segment,) for _, _, segment in step.before.segments())
                self.meeting[x] = Sharding(apart, step.before.partial)
        at = _position(step.before, d, i) if expand else d
        length = Segment(step.after.dims[d][i].size, step.after.dims[d][i].axes).local(self.mesh)
        if step.kind == "all_gather":
            x = self.new.call_function(collectives.all_gather, (x, at, step.axes, length))
        elif step.kind == "reduce_scatter":
            x = self.new.call_function(collectives.reduce_scatter, (x, at, step.axes))
        elif step.kind == "shard":
            x = self.new.call_function(collectives.shard, (x, at, step.axes))
        else:
            onto = _position(step.before, *step.other) if expand else step.other[0]
            x = self.new.call_function(collectives.all_to_all, (x, onto, at, step.axes[0], length))
        return self._reshape(x, step.after.local_shape(self.mesh)) if expand else x

    def _reshape(self, x: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        import torch

        return self.new.call_function(torch.ops.aten.reshape.default, (x, list(shape)))

    def _op(self, node: fx.Node, chosen: Chosen) -> fx.Node:
        rule, decision = chosen.rule, chosen.decision
        operands = [self.env[n] for n in operand_nodes(node)]
        if not rule.dense and not any(s.axes for dim in decision.segments.values() for s in dim):
            return self.new.node_copy(node, self.env.__getitem__)
        operands = [self._fill(x, i, chosen) for i, x in enumerate(operands)]
        operands = [self._contiguous(x) if i in rule.dense else x for i, x in enumerate(operands)]
        results = tuple(None if s is None else s.local_shape(self.mesh) for s in decision.results)
        first = decision.results[0]
        expanded = bool(rule.indexed and first is not None and any(len(dim) > 1 for dim in first.dims))
        if expanded and first is not None:
            results = (first.expanded_shape(self.mesh),)
            operands = [self._reshape(x, results[0]) for x in operands[:1]] + operands[1:]
        shards = Shards(
            sizes={f: math.prod(s.local(self.mesh) for s in dim) for f, dim in decision.segments.items()},
            cut=frozenset(f for f, dim in decision.segments.items() if any(s.axes for s in dim)),
            result_shapes=results,
            operand_shapes=tuple(s.local_shape(self.mesh) for s in decision.operands),
            result_expanded=tuple(None if s is None else _expanded(k, s) for k, s in enumerate(decision.results)),
        )
        call = unchanged(chosen.call)
        if rule.local is not None:
            call = rule.local(chosen.call, call, shards)
        made = emit(self.new, call, operands, lambda o: self._offset(self._segment_of(o.factor, chosen)))
        if expanded and first is not None:
            made = self._reshape(made, first.local_shape(self.mesh))
        return made

    def _contiguous(self, x: fx.Node) -> fx.Node:
        import torch

        return self.new.call_function(torch.ops.aten.contiguous.default, (x,))

    def _fill(self, x: fx.Node, index: int, chosen: Chosen) -> fx.Node:
        """Neutral elements into the operand's padding along factors that the op reduces."""
        rule, sharding = chosen.rule, chosen.decision.operands[index]
        for d, factors in enumerate(rule.operands[index]):
            segment_index = 0
            for factor in factors:
                for segment in chosen.decision.segments[factor]:
                    if factor in {*rule.reduce, *rule.masked} and segment.axes and segment.padded(self.mesh):
                        x = self._fill_one(x, sharding, d, segment_index, rule.neutral(factor))
                    segment_index += 1
        return x

    def _fill_one(self, x: fx.Node, sharding: Sharding, d: int, i: int, value: float) -> fx.Node:
        segment = sharding.dims[d][i]
        key = (x, f"{sharding} {d} {i} {value}")
        if key not in self.filled:
            expand = len(sharding.dims[d]) > 1
            y = self._reshape(x, sharding.expanded_shape(self.mesh)) if expand else x
            at = _position(sharding, d, i) if expand else d
            y = self.new.call_function(collectives.fill_padding, (y, at, segment.size, segment.axes, value))
            self.filled[key] = self._reshape(y, sharding.local_shape(self.mesh)) if expand else y
        return self.filled[key]

    def _segment_of(self, name: str, chosen: Chosen) -> Segment:
        if name.startswith("result:"):
            _, result, position = name.split(":")
            sharding = chosen.decision.results[int(result)]
            assert sharding is not None
            return [s for _, _, s in sharding.segments()][int(position)]
        dim = chosen.decision.segments[name]
        cut = [s for s in dim if s.axes]
        if not cut:
            return Segment(1)
        assert len(dim) == 1, f"factor {name} of {chosen.call.name} is cut in pieces, so it has no single offset"
        return cut[0]

    def _offset(self, segment: Segment) -> fx.Node | int:
        strides = tuple(zip(segment.axes, segment.chunks(self.mesh), strict=True))
        if not strides:
            return 0
        if strides not in self.offsets:
            self.offsets[strides] = self.new.call_function(collectives.offset, (strides,))
        return self.offsets[strides]


def _expanded(result: int, sharding: Sharding) -> tuple[tuple[int, ...], tuple[Offset, ...]]:
    segments = [s for _, _, s in sharding.segments()]
    return tuple(s.size for s in segments), tuple(Offset(f"result:{result}:{k}") for k in range(len(segments)))


def _position(sharding: Sharding, dim: int, segment: int) -> int:
    """Where a segment stands when every segment is a dim of its own."""
    return sum(len(d) for d in sharding.dims[:dim]) + segment


def _sharding(node: fx.Node) -> Sharding:
    found = annotation(node).sharding
    assert found is not None, f"{node} has no sharding"
    return found
