"""When two regions are equal: the same ops with the same arguments in the same wiring, on weights of the same shapes.

A region's *portrait* names nothing but positions: its own nodes by their order, what it reads from outside by the order
of first use (its *slots*), its weights by their names within the region.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import fx

from meshwright.compiler.analysis.regions import Regions, type_of
from meshwright.compiler.graph.adapter import OpOverload
from meshwright.compiler.graph.program import annotation


@dataclass
class Portrait:
    """A region of one graph: ``lines`` to be compared, and the nodes that its positions stand for."""

    region: str
    nodes: list[fx.Node] = field(default_factory=list)
    slots: list[fx.Node] = field(default_factory=list)
    """What it reads of other regions, or of none."""
    exports: list[int] = field(default_factory=list)
    """Positions of nodes that others read, but for sums over regions and outputs of its own weights."""
    lines: tuple[Hashable, ...] = ()


def portraits(regions: Regions) -> dict[str, Portrait]:
    """The portrait of every region, in the order in which they begin."""
    found: dict[str, Portrait] = {}
    for node in regions.graph.module.graph.nodes:
        region = regions.of.get(node)
        if region is not None and node.op == "call_function":
            found.setdefault(region, Portrait(region)).nodes.append(node)
    for portrait in found.values():
        _draw(portrait, regions)
    return found


def _draw(portrait: Portrait, regions: Regions) -> None:
    position = {node: i for i, node in enumerate(portrait.nodes)}
    owned: dict[fx.Node, int] = {}
    slots: dict[fx.Node, int] = {}

    def seen(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            if value in position:
                return ("node", position[value])
            if regions.of.get(value) == portrait.region:
                role = regions.roles[value]
                name = within(role.name, portrait.region) if role.kind != "constant" else ""
                return ("own", owned.setdefault(value, len(owned)), role.kind, name, type_of(value))
            return ("slot", slots.setdefault(value, len(slots)), type_of(value))
        if isinstance(value, (list, tuple)):
            return tuple([seen(v) for v in value])
        if isinstance(value, (bool, int, float)):
            return (type(value), repr(value))
        return value if isinstance(value, Hashable) else repr(value)

    lines: list[Hashable] = []
    for i, node in enumerate(portrait.nodes):
        args = node.args
        at = site_of(node)
        if at is not None:  # numbers the draws of random numbers, which differ everywhere
            args = (*args[:at], None, *args[at + 1 :])
        keywords = tuple((k, seen(v)) for k, v in node.kwargs.items()) if node.kwargs else ()
        read = {"sum" if u in regions.sums else "out" for u in node.users if _leaves(u, portrait.region, regions)}
        given = tuple((v.kind, within(v.name, portrait.region)) for v in regions.results.get(node, ()))
        if "out" in read or any(name is None for _, name in given):
            portrait.exports.append(i)
        what = (tuple(sorted(read)), given)
        lines.append((node.target, seen(args), keywords, type_of(node), annotation(node).phase, what))
    portrait.slots = list(slots)
    portrait.lines = tuple(lines)


def _leaves(user: fx.Node, region: str, regions: Regions) -> bool:
    return user.op != "output" and regions.of.get(user) != region


def within(name: str, region: str) -> str | None:
    """A name as seen from the region that it lies in; None if it lies elsewhere."""
    return name[len(region) + 1 :] if name.startswith(region + ".") else None


def site_of(node: fx.Node) -> int | None:
    """Which argument of a random op numbers its draws; None if it draws nothing."""
    if not isinstance(node.target, OpOverload):
        return None
    places = _places(node.target)
    if places is None or len(node.args) <= places[1] or node.args[places[0]] is None:
        return None
    return places[1]


@cache
def _places(target: OpOverload) -> tuple[int, int] | None:
    names = [a.name for a in target._schema.arguments]
    return (names.index("seed"), names.index("site")) if "site" in names else None
