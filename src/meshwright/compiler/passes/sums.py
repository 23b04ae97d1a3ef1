"""Sums whose terms owe: terms that owe the same are added before they are paid.

``(r + a) + b``, where ``a`` and ``b`` owe the same sums, becomes ``r + (a + b)``: paid once instead of
twice. A total of many scalars is taken group by group of what they owe, and each group is paid once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from meshwright.compiler.graph.calls import overload
from meshwright.compiler.mesh import Sharding
from meshwright.compiler.passes.moves import Moves
from meshwright.compiler.passes.placement import DECISION, Chosen, Placed
from meshwright.compiler.passes.strategy import Decision
from meshwright.compiler.rules.rule import OpCall, Rule

Add = Callable[[Placed, Placed], Placed]
"""Puts the sum of two values into the graph."""
Annotate = Callable[[fx.Node, Sharding], fx.Node]


def terms_of(operands: list[Placed]) -> tuple[Placed, Placed] | None:
    """Of a sum's two operands the one that owes nothing and the one that owes, if there is one of each."""
    owing = [p for p in operands if p.sharding.owed]
    paid = [p for p in operands if not p.sharding.owed]
    return (paid[0], owing[0]) if len(owing) == len(paid) == 1 else None


def regrouped(first: Placed, second: Placed, add: Add) -> Placed | None:
    """The sum of a sum that nothing else reads and a term that owes what one of its terms owes.

    The sum made before, and its payment, are then read by nobody and fall away.
    """
    for whole, owing in ((first, second), (second, first)):
        if whole.terms is not None and owing.sharding.owed and whole.terms[1].sharding == owing.sharding:
            paid, earlier = whole.terms
            inner = add(earlier, owing)
            return replace(add(paid, inner), terms=(paid, inner))
    return None


def total_by_groups(
    graph: fx.Graph, call: OpCall, node: fx.Node, scalars: list[Placed], moves: Moves, annotate: Annotate
) -> Placed | None:
    """The total of scalars that owe different sums; None where all owe the same."""
    groups: dict[Sharding, list[Placed]] = {}
    for placed in scalars:
        groups.setdefault(placed.sharding, []).append(placed)
    if len(groups) == 1:
        return None

    def total(members: list[Placed], sharding: Sharding) -> Placed:
        made = graph.call_function(overload(call.name), ([m.node for m in members],))
        annotate(made, sharding)
        whole = Decision({}, (sharding,) * len(members), (sharding,), {})
        made.meta[DECISION] = Chosen(call, Rule({}, ((),) * len(members), ((),)), whole)
        return Placed(made, sharding, {})

    parts = [moves.move(total(members, s), s.paid(), node) for s, members in groups.items()]
    return total(parts, Sharding(()))
