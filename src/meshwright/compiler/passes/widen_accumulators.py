"""Sums within a rank that keep their partial sums in half precision, taken in fp32 and rounded once.

Ops that were measured to accumulate so get their operands in fp32; a gradient that is added up term by term, of a
parameter that is used many times, is added up in fp32; and a sum that is divided afterwards is rounded then.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.program import annotation
from meshwright.compiler.numerics.averages import factor, local_sum
from meshwright.compiler.numerics.casts import CAST, HALVES, dtype_of, half, narrows
from meshwright.compiler.numerics.local_sums import LowAccumulator, LowChain, low_accumulators, low_chains

WIDE = torch.float32


def widen_accumulators(graph: fx.Graph) -> None:
    """Rewrite the sums of a graph. The shapes of new nodes are left to :func:`verify_shapes`."""
    for accumulator in low_accumulators(graph):
        _widen_op(accumulator)
    for chain in low_chains(graph):
        _widen_chain(chain)
    for node in graph.nodes:
        source = local_sum(node) if node.op == "call_function" and factor(node) is not None else None
        if source is not None:
            _widen_average(node, source)


def _widen_op(found: LowAccumulator) -> None:
    node = found.node
    value = node.meta.pop("val")
    results = value if isinstance(value, (tuple, list)) else (value,)
    before = {source: _widened(source, node) for source in node.all_input_nodes if half(source)}
    for source, wide in before.items():
        node.replace_input_with(source, wide)
    if isinstance(value, Tensor):
        _round(node, value.dtype)
        return
    for item in list(node.users):
        index = item.args[1]
        if item.target is operator.getitem and isinstance(index, int) and isinstance(results[index], Tensor):
            item.meta.pop("val", None)
            if results[index].dtype in HALVES:
                _round(item, results[index].dtype)


def _widen_chain(chain: LowChain) -> None:
    sums = {chain.last, *chain.partial}
    dtype = dtype_of(chain.last)
    assert dtype is not None
    # in the order of the graph, so that a sum is widened after the sums that it adds to
    for node in sorted(sums):
        for source in node.all_input_nodes:
            if source not in sums:
                node.replace_input_with(source, _widened(source, node))
    for node in sums:
        node.meta.pop("val", None)
        annotation(node).dtype = WIDE
    _round(chain.last, dtype)


def _widen_average(node: fx.Node, source: fx.Node) -> None:
    """Let a sum be divided before it is rounded."""
    dtype = dtype_of(node)
    assert dtype is not None
    source.kwargs = {**source.kwargs, "dtype": WIDE}
    at = node
    while True:
        at.meta.pop("val", None)
        annotation(at).dtype = WIDE
        if at is source:
            break
        at = at.all_input_nodes[0]
    _round(node, dtype)


def _widened(source: fx.Node, reader: fx.Node) -> fx.Node:
    """The value in fp32: as it was before it was rounded, if it was."""
    if narrows(source):
        wide = source.args[0]
        if isinstance(wide, fx.Node) and dtype_of(wide) == WIDE:
            return wide
    with reader.graph.inserting_before(reader):
        made = reader.graph.call_function(CAST, (source,), {"dtype": WIDE})
    made.meta = {"meshwright": replace(annotation(source), dtype=WIDE, phase=annotation(reader).phase)}
    return made


def _round(node: fx.Node, dtype: torch.dtype) -> None:
    """Give the readers of a value that is now in fp32 what they had before, but those that want fp32."""
    users = list(node.users)
    for user in users:
        if user.target is CAST and user.kwargs.get("dtype") == WIDE and set(user.kwargs) == {"dtype"}:
            user.replace_all_uses_with(node)
    others = [u for u in users if u.users or u.op == "output"]
    if others:
        with node.graph.inserting_after(node):
            low = node.graph.call_function(CAST, (node,), {"dtype": dtype})
        low.meta = {"meshwright": replace(annotation(node), dtype=dtype)}
        for user in others:
            user.replace_input_with(node, low)
    annotation(node).dtype = WIDE
