"""Findings about sums over ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.numerics.averages import factor
from meshwright.compiler.numerics.casts import dtype_of, half, is_cast, is_view, through_views
from meshwright.compiler.numerics.error_model import LARGEST, error_of_sum, one_rounding
from meshwright.compiler.numerics.finding import Finding
from meshwright.compiler.numerics.looked import Gradient, Looked
from meshwright.compiler.numerics.of_sums import addends_of, sum_code
from meshwright.compiler.numerics.rank_sums import MOST, RankSum, narrowed_before, rank_sums
from meshwright.compiler.plan import HALVES, Plan


def findings_of_rank_sums(looked: Looked, mesh: Mesh, plan: Plan | None) -> Iterator[Finding]:
    """E0720 or E0732, E0721, E0722, E0730 and E0731 of the sums over ranks of a graph."""
    sums = list(rank_sums(looked.graph, mesh))
    nodes = {s.node for s in sums}
    # two addends are rounded once in any case, and a plan that is safe and sends gradients so wants it
    settled = plan is not None and plan.numerics == "safe" and plan.precision.reduce in HALVES
    for one in sums:
        at = _At(looked, one)
        if half(one.source):
            yield from at.low()
            yield from at.overflow()
            yield from at.averaged()
            if not settled or one.count > MOST:
                yield from at.narrowed()
        yield from at.between(nodes)


def gradients_of(looked: Looked, mesh: Mesh | None) -> dict[str, Gradient]:
    """How a graph makes gradients; over ranks, where there is a mesh."""
    sums = {s.node for s in rank_sums(looked.graph, mesh)} if mesh is not None else set()
    found = {}
    for value, node in looked.outputs.items():
        if value.kind == "gradient":
            origin = looked.origin(node)
            line = Origin(value.name.rpartition(".")[0], origin.file, origin.line, origin.text)
            found[value.name] = Gradient(line, _rounded_since_sum(looked, node, sums) or "")
    return found


def _rounded_since_sum(looked: Looked, node: fx.Node, sums: set[fx.Node]) -> str | None:
    """Where a value is a sum over ranks but for casts and views: the half precision dtype that it had since; empty if
    it had none. None where it is not."""
    dtype = ""
    while True:
        if half(node):
            dtype = short_name(dtype_of(node) or torch.float32)
        gradient = looked.gradient(node)
        if gradient is not None:
            return gradient.summed or None
        if node in sums or node.target is collectives.reduce_scatter_wide:
            return dtype
        if not (is_cast(node) or is_view(node) or node.target in (operator.getitem, collectives.wait)):
            return None
        node = node.all_input_nodes[0]


@dataclass(frozen=True)
class _At:
    looked: Looked
    one: RankSum

    def _finding(self, code: str, message: str, error: float, rewrite: str, dtype: str) -> Finding:
        one = self.one
        origin = self.looked.origin(one.source)
        nodes = (one.node.name,)
        addends = addends_of(one.source)
        return Finding(code, message, self.looked.name, nodes, dtype, one.count, addends, error, rewrite, origin)

    @property
    def _dtype(self) -> str:
        return short_name(dtype_of(self.one.source) or torch.float32)

    @property
    def _over(self) -> str:
        return f"over {self.one.count} ranks ({', '.join(self.one.axes)})"

    def low(self) -> Iterator[Finding]:
        if self.one.count <= MOST:
            return
        dtype, addends = self._dtype, addends_of(self.one.source)
        code = sum_code("E0720", dtype, self.one.count, addends)
        message = f"a sum {self._over} keeps its partial sums in {dtype}"
        error = error_of_sum(dtype, self.one.count, addends)
        yield self._finding(code, message, error, "all-to-all", dtype)

    def overflow(self) -> Iterator[Finding]:
        if self._dtype == "f16":
            limit = LARGEST["f16"] / self.one.count
            message = f"a sum {self._over} in f16 overflows when its addends pass {limit:.3g}"
            yield self._finding("E0721", message, 1.0, "all-to-all", "f16")

    def averaged(self) -> Iterator[Finding]:
        source = through_views(self.one.source)
        by = factor(source)
        if by is not None:
            dtype = self._dtype
            message = f"what is summed {self._over} is divided by {by:g} in {dtype} before, which rounds every addend"
            yield self._finding("E0722", message, one_rounding(dtype), "divide after", dtype)

    def narrowed(self) -> Iterator[Finding]:
        cast = narrowed_before(self.one.source)
        if cast is None:
            return
        dtype = self._dtype
        addends = addends_of(cast.args[0])
        error = one_rounding(dtype) / (math.sqrt(self.one.count) if addends == "coherent" else 1)
        message = f"what is summed {self._over} is rounded to {dtype} just before"
        yield self._finding("E0730", message, error, "move cast", dtype)

    def between(self, sums: set[fx.Node]) -> Iterator[Finding]:
        """A sum whose addends are sums over other ranks that were rounded on the way."""
        dtype = _rounded_since_sum(self.looked, self.one.source, sums)
        if dtype:
            message = f"a sum is rounded to {dtype} before it is summed further, {self._over}"
            yield self._finding("E0731", message, one_rounding(dtype), "fp32", dtype)
