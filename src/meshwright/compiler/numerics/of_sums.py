"""Findings about sums within a rank: ops that accumulate in half precision, sums of many terms, averages, overflow."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import fx

from meshwright.compiler.graph.adapter import OpOverload, overload_name
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.numerics.accumulators import measured_on, rows
from meshwright.compiler.numerics.averages import factor, local_sum
from meshwright.compiler.numerics.casts import dtype_of, narrows, shape_of, through_views
from meshwright.compiler.numerics.error_model import BIASED, LARGEST, UNIT, Addends, error_of_sum, one_rounding
from meshwright.compiler.numerics.finding import Finding
from meshwright.compiler.numerics.local_sums import ROWS, LowChain, low_accumulators, low_chains
from meshwright.compiler.numerics.looked import Looked
from meshwright.compiler.numerics.signs import nonnegative

_SUMS = ("aten.sum.default", "aten.sum.dim_IntList")


def findings_of_local_sums(looked: Looked, backend: str | None) -> Iterator[Finding]:
    """E0722, E0724, E0725, E0730 and E0732 of ops, E0721 of sums over dims."""
    for found in low_accumulators(looked.graph, backend):
        yield _of_accumulator(looked, found.node, found.dtype, found.count, backend)
    for chain in low_chains(looked.graph):
        yield _of_chain(looked, chain)
    for node in looked.graph.nodes:
        if node.op == "call_function":
            yield from _of_average(looked, node)
            yield from _of_plain_sum(looked, node)


def addends_of(*sources: object) -> Addends:
    """Of one sign where the ops that they come from say so."""
    known = all(isinstance(s, fx.Node) and nonnegative(s) for s in sources)
    return "coherent" if known and sources else "random signs"


def sum_code(code: str, dtype: str, count: int, addends: Addends) -> str:
    """The code of a sum: E0732 where coherent addends are so many that they get lost."""
    return "E0732" if addends == "coherent" and count * UNIT[dtype] > BIASED else code


def _of_accumulator(looked: Looked, node: fx.Node, dtype: str, count: int, backend: str | None) -> Finding:
    name = overload_name(node.target) if isinstance(node.target, OpOverload) else node.name
    halves = [s for s in node.all_input_nodes if dtype_of(s) in (torch.bfloat16, torch.float16)]
    # of a scatter into zeros the zeros count as well: they have no sign
    addends = addends_of(*halves)
    error = error_of_sum(dtype, count, addends)
    message = f"{name} adds up to {count} rows and keeps the partial sums in {dtype}"
    code = sum_code("E0725", dtype, count, addends)
    origin, source = looked.origin(node), measured_on(name, dtype, backend)
    return Finding(
        code, message, looked.name, (node.name,), dtype, count, addends, error, "fp32", origin, source=source
    )


def _of_chain(looked: Looked, chain: LowChain) -> Finding:
    dtype = _dtype(chain.last)
    count = len(chain.terms)
    ends = {through_views_of_casts(node): value.name for value, node in looked.outputs.items()}
    name = ends.get(chain.last, "")
    what = f"the gradient of '{name}', which is used {count} times," if name else f"a sum of {count} terms"
    addends = addends_of(*chain.terms)
    error = error_of_sum(dtype, count, addends)
    code = sum_code("E0724", dtype, count, addends)
    message = f"{what} is added up term by term in {dtype}"
    nodes = (chain.last.name,)
    return Finding(code, message, looked.name, nodes, dtype, count, addends, error, "fp32", looked.origin(chain.last))


def through_views_of_casts(node: fx.Node) -> fx.Node:
    """What an output is, but for views and casts."""
    while True:
        inner = through_views(node)
        if inner is node and node.target is torch.ops.aten._to_copy.default:
            inner = node.all_input_nodes[0]
        if inner is node:
            return node
        node = inner


def _of_average(looked: Looked, node: fx.Node) -> Iterator[Finding]:
    by = factor(node)
    source = local_sum(node) if by is not None else None
    if by is None or source is None:
        return
    dtype = _dtype(node)
    message = f"a sum in {dtype} is divided by {by:g}, which rounds it again"
    error = math.hypot(one_rounding(dtype), one_rounding(dtype))
    origin = looked.origin(node)
    yield Finding(
        "E0722", message, looked.name, (node.name,), dtype, rows(source), "random signs", error, "divide after", origin
    )


def _of_plain_sum(looked: Looked, node: fx.Node) -> Iterator[Finding]:
    if not isinstance(node.target, OpOverload) or overload_name(node.target) not in _SUMS:
        return
    source = node.all_input_nodes[0]
    count = rows(node)
    if count < ROWS:
        return
    made = dtype_of(node)
    if made == torch.float16 and dtype_of(source) == torch.float16:
        addends = addends_of(source)
        message = f"a sum of {count} addends in f16 overflows when they pass {LARGEST['f16'] / count:.3g}"
        origin = looked.origin(node)
        yield Finding("E0721", message, looked.name, (node.name,), "f16", count, addends, 1.0, "fp32", origin, WIDER)
    inner = through_views(source)
    if narrows(inner) and len(inner.users) == 1 and shape_of(node) != shape_of(source):
        dtype = _dtype(inner)
        addends = addends_of(inner.args[0])
        # each addend is rounded by itself: of random signs that costs what one rounding of the sum does
        error = one_rounding(dtype) / (math.sqrt(count) if addends == "coherent" else 1)
        message = f"{count} addends are rounded to {dtype} just before they are added up"
        origin = looked.origin(node)
        yield Finding(
            "E0730", message, looked.name, (node.name,), dtype, count, addends, error, "move cast", origin, SUM_FIRST
        )


WIDER = "sum in fp32: x.sum(dtype=torch.float32)"
SUM_FIRST = "cast after the sum"


def _dtype(node: fx.Node) -> str:
    dtype = dtype_of(node)
    assert dtype is not None
    return short_name(dtype)
