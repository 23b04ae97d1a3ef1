"""Hide sums that the next op needs (those of tensor parallelism) behind products that only gradients need.

The gradients of a block's weights are computed before the sum that its input's gradient owes, but nothing waits for
them: computed while the sum is under way, they cost nothing. What is moved stays within the half of a block between
two such sums, so no activation lives much longer for it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.begin import can_begin, split

CONTRACTIONS = frozenset(
    f"{space}::{name}"
    for space, names in (
        ("meshwright", ("einsum", "attention", "attention_backward", "routed_mm", "routed_outer")),
        ("aten", ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")),
    )
    for name in names
)
"""Ops that take long enough to hide a message behind."""


def hide_sums(graph: fx.Graph, mesh: Mesh, others: set[fx.Node], free: set[fx.Node]) -> None:
    """Begin collectives behind which there is other work to do, and wait for them where they are read.

    ``others`` are collectives that are placed in another way, ``free`` values that they may overwrite.
    """
    critical = [n for n in graph.nodes if can_begin(n, mesh) and n not in others]
    for node in critical:
        movable = _movable(node, set(critical))
        readers = set(_readers(node))
        between = list(_until(node, readers))
        if not any(map(_is_contraction, (*movable, *between))):
            continue
        message = split(node, free)
        for other in movable:
            message.wait.prepend(other)
        first = between[-1].next if between else message.wait
        results = list(message.wait.users)
        if between:
            for part in (message.wait, *(r for r in results if r.target is operator.getitem)):
                first.prepend(part)


def _movable(node: fx.Node, critical: set[fx.Node]) -> list[fx.Node]:
    """What stands before a collective and may as well stand after it: of the ops since the last such collective, no
    further back than the block before, those that it does not need, from the first contraction on."""
    found: list[fx.Node] = []
    needed = set(node.all_input_nodes)
    sections = {_section(node)}
    other = node.prev
    while other.op == "call_function" and other not in critical and other.target is not collectives.wait:
        sections.add(_section(other))
        if len(sections) > 2:
            break
        if other in needed:
            needed.update(other.all_input_nodes)
        else:
            found.append(other)
        other = other.prev
    found.reverse()
    first = next((i for i, n in enumerate(found) if _is_contraction(n)), len(found))
    return found[first:]


def _section(node: fx.Node) -> tuple[str, str]:
    note = annotation(node)
    return note.phase, note.block


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.target is operator.getitem:
            yield from _readers(user)
        else:
            yield user


def _until(node: fx.Node, readers: set[fx.Node]) -> Iterator[fx.Node]:
    """The nodes between a collective and the first that reads its results, without those that take them apart."""
    other = node.next
    while other.op == "call_function" and other not in readers:
        yield other
        other = other.next


def _is_contraction(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in CONTRACTIONS
