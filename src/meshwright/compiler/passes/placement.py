"""What propagation knows of a graph: how the values at its border lie, and how each node is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from meshwright.compiler.graph.program import Value
from meshwright.compiler.mesh import Sharding
from meshwright.compiler.passes.proposals import Priority
from meshwright.compiler.passes.strategy import Decision
from meshwright.compiler.rules.rule import OpCall, Rule

DECISION = "meshwright_decision"
"""The key in ``node.meta`` under which lowering finds how a node is cut."""


@dataclass(frozen=True)
class Placement:
    """How the values at a graph's border lie."""

    inputs: Mapping[Value, Sharding]
    outputs: Mapping[Value, Sharding]
    """Targets. Sums that a target does not name may stay owed where ``may_owe`` says so."""
    may_owe: frozenset[Value] = frozenset()
    storage: Mapping[Value, frozenset[str]] = field(default_factory=dict)
    """The axes by which an input is only stored in shards (a weight to be gathered before use)."""
    wanted: Mapping[Value, Sharding] = field(default_factory=dict)
    """How outputs should be made where nothing they are computed from is cut so (gradients)."""
    early: Mapping[Value, Sharding] = field(default_factory=dict)
    """Inputs that are brought into another sharding before anything else reads them."""
    pays: Mapping[Value, frozenset[str]] = field(default_factory=dict)
    """By value that ``may_owe``: if it owes over no other axes than these, it does not."""


@dataclass(frozen=True)
class Chosen:
    """How a node is cut, kept for lowering: its op, its rule and the decision."""

    call: OpCall
    rule: Rule
    decision: Decision


@dataclass
class Placed:
    """A value in the graph that propagation makes."""

    node: fx.Node
    sharding: Sharding
    priority: dict[str, Priority]
    weight: bool = False
    """Whether it is made of stored weights alone, by casts and views."""
    owed_in: int = 0
    """Of a value that owes sums: the bytes of an element in which its addends were made, or the fewest that they have
    had since; 0 where it owes none."""
    terms: tuple[Placed, Placed] | None = None
    """Of a sum that nothing else reads: a term that owed nothing, and one that still owes (see :mod:`sums`)."""
