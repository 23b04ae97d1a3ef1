"""Compares what a cluster file declares of its links with what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.collectives import message_cost
from meshwright.compiler.cluster.units import amount, seconds
from meshwright.compiler.diagnostics import Diagnostic
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import MessageKind

SLOWER = 1.5
"""How many times longer than declared a message may take before that is told."""
PAYLOAD = 64 << 20
"""A message in which bandwidth counts and not latency."""


@dataclass(frozen=True)
class Observed:
    """One message of a real run, and how long it was on the links."""

    axes: tuple[str, ...]
    kind: MessageKind
    payload: int
    seconds: float


def compare_observed(cluster: Cluster, mesh: Mesh, observed: Iterable[Observed]) -> list[Diagnostic]:
    """A warning W0410 for each tier whose messages took far longer than the cluster's links explain (the worst one is
    told)."""
    worst: dict[str, tuple[float, Observed, float]] = {}
    for one in observed:
        cost = message_cost(cluster, mesh, one.axes, one.kind, one.payload)
        if cost.seconds <= 0:
            continue
        ratio = one.seconds / cost.seconds
        if ratio > SLOWER and ratio > worst.get(cost.tier, (0.0,))[0]:
            worst[cost.tier] = (ratio, one, cost.seconds)
    return [
        Diagnostic(
            "W0410",
            f"the links '{tier}' of the cluster '{cluster.name}' are {ratio:.1f} times slower than declared: "
            f"{_article(one.kind)} of {amount(one.payload)} over {', '.join(one.axes)} took {seconds(one.seconds)}, "
            f"expected were {seconds(expected)}",
            action="look for a degraded link or a wrong network interface, or measure with 'meshwright calibrate'",
        )
        for tier, (ratio, one, expected) in worst.items()
    ]


def compare_declared(cluster: Cluster, measured: Cluster) -> list[Diagnostic]:
    """The same for a measured cluster, such as ``meshwright calibrate`` writes.

    At each tier of ``cluster``, collectives of 64 MiB over groups that cross it alone are compared.
    Raises ValueError if the two have different numbers of devices.
    """
    if cluster.ranks != measured.ranks:
        raise ValueError(f"{cluster.ranks} devices are declared, {measured.ranks} were measured")
    found: dict[str, Diagnostic] = {}
    inside = 1
    for tier in cluster.tiers:
        # one member in each unit below the tier, so that no other tier can be the slow one
        outer = cluster.ranks // inside // tier.size
        axes = (f"{tier.size} members of '{tier.name}'",)
        mesh = Mesh((("outer", outer), (axes[0], tier.size), ("inner", inside)))
        inside *= tier.size
        taken = [
            Observed(axes, kind, PAYLOAD, message_cost(measured, mesh, axes, kind, PAYLOAD).seconds)
            for kind in get_args(MessageKind)
        ]
        for warning in compare_observed(cluster, mesh, taken):
            found.setdefault(warning.message.split("'")[1], warning)
    return list(found.values())


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
