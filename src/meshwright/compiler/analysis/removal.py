"""How regions are taken out of a graph: whoever read a stream behind them reads the stream in front of them.

What a region does to a stream (the residual stream, its gradient) has the type of what it was given. Which of a
region's inputs continues as which of its outputs is read off the wiring of equal regions: where the output of one is
the input of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from meshwright.compiler.analysis.likeness import Portrait
from meshwright.compiler.analysis.regions import Regions, is_total, type_of
from meshwright.compiler.graph.program import annotation

Place = tuple[str, str, int]
"""A kind of region, "in" or "out", and the number of its slot or export."""


class Unsafe(Exception):
    """Why a region cannot be taken out."""

    def __init__(self, region: str, reason: str) -> None:
        super().__init__(reason)
        self.region = region


@dataclass
class Removal:
    """What becomes of the nodes of a graph when regions are taken out."""

    regions: Regions
    removed: frozenset[str]
    instead: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """For streams that leave a removed region: what they were on the way in."""
    _known: dict[fx.Node, fx.Node | None] = field(default_factory=dict)

    def resolve(self, node: fx.Node) -> fx.Node | None:
        """What a reader of ``node`` reads now; None: nothing, it was a term that is gone."""
        pending = [node]
        while pending:
            at = pending[-1]
            if at in self._known:
                pending.pop()
                continue
            waits = [n for n in self._behind(at) if n not in self._known]
            if waits:
                pending.extend(waits)
            else:
                self._known[at] = self._resolved(at)
                pending.pop()
        return self._known[node]

    def _behind(self, node: fx.Node) -> list[fx.Node]:
        if node in self.instead:
            return [self.instead[node]]
        return list(node.all_input_nodes) if node in self.regions.sums else []

    def _resolved(self, node: fx.Node) -> fx.Node | None:
        if node in self.instead:
            return self._known[self.instead[node]]
        if node in self.regions.sums:
            # a stream that is also a term: as a term it is gone with its region
            kept = [t for t in node.all_input_nodes if self._stays(t)]
            whole = len(kept) == len(node.all_input_nodes) or (kept and is_total(node))
            return node if whole else self._known[kept[0]] if kept else None
        return None if self._gone(node) else node

    def _stays(self, term: fx.Node) -> bool:
        return not self._gone(term) and self._known[term] is not None

    def _gone(self, node: fx.Node) -> bool:
        return self.regions.of.get(node) in self.removed

    def terms(self, total: fx.Node) -> list[fx.Node]:
        """The terms of a total that stay."""
        self.resolve(total)
        (terms,) = total.args
        assert isinstance(terms, (list, tuple))
        return [t for t in terms if isinstance(t, fx.Node) and self._stays(t)]

    def read(self, node: fx.Node) -> fx.Node:
        """What a reader of ``node`` reads now. Raises Unsafe if that is gone."""
        found = self.resolve(node)
        if found is None:
            raise Unsafe(
                self.regions.of.get(node, ""), f"{node.name} is read by what stays when its block is taken out"
            )
        return found


def plan_removal(
    regions: Regions, portraits: Mapping[str, Portrait], kinds: Mapping[str, str], removed: frozenset[str]
) -> Removal:
    """The removal of regions, ``kinds`` being the kind of every region. Raises Unsafe."""
    streams = _Streams(regions, portraits, kinds)
    removal = Removal(regions, removed)
    for region in removed:
        portrait = portraits.get(region)
        for at in portrait.exports if portrait is not None else ():
            assert portrait is not None
            node = portrait.nodes[at]
            _check_readers(node, region, regions)
            removal.instead[node] = portrait.slots[streams.way_in(region, at)]
    return removal


def _check_readers(node: fx.Node, region: str, regions: Regions) -> None:
    """A stream is read by the next regions or, behind the last one, by what follows; not by both."""
    if node in regions.results:
        raise Unsafe(region, f"{node.name} of block {region} is an output of the step")
    users = [u for u in node.users if u not in regions.sums and regions.of.get(u) != region]
    inside = [u for u in users if u in regions.of]
    if inside and len(inside) < len(users):
        raise Unsafe(region, f"{node.name} of block {region} is read by a block and outside of blocks")


class _Streams:
    """Which slots and exports of the kinds of regions are the same stream."""

    def __init__(self, regions: Regions, portraits: Mapping[str, Portrait], kinds: Mapping[str, str]) -> None:
        self._kinds = kinds
        self._portraits = portraits
        self._parent: dict[Place, Place] = {}
        self._shared: set[Place] = set()
        members: dict[str, list[Portrait]] = {}
        exports: dict[fx.Node, Place] = {}
        for region, portrait in portraits.items():
            members.setdefault(kinds[region], []).append(portrait)
            exports.update({portrait.nodes[at]: (kinds[region], "out", at) for at in portrait.exports})
        for kind, copies in members.items():
            for s, sources in enumerate(zip(*(p.slots for p in copies), strict=True)):
                if len(copies) > 1 and len(set(sources)) == 1:
                    self._shared.add((kind, "in", s))  # the same value for all of them is no stream
                    continue
                for source in sources:
                    if source in exports:
                        self._union((kind, "in", s), exports[source])

    def way_in(self, region: str, at: int) -> int:
        """The slot whose value continues as the export ``at``. Raises Unsafe."""
        portrait, kind = self._portraits[region], self._kinds[region]
        stream = self._find((kind, "out", at))
        node = portrait.nodes[at]
        found = [s for s in range(len(portrait.slots)) if self._find((kind, "in", s)) == stream]
        if not found:
            # where kinds alternate, no block is followed by one of its own kind: the one stream of this type and phase
            like = _like(node)
            streams = [s for s in range(len(portrait.slots)) if (kind, "in", s) not in self._shared]
            found = [s for s in streams if _like(portrait.slots[s]) == like]
            alike = [e for e in portrait.exports if _like(portrait.nodes[e]) == like]
            found = found if len(alike) == 1 else []
        if len(found) != 1:
            what = "does not continue" if not found else "continues several"
            raise Unsafe(region, f"{node.name} leaves block {region} and {what} of what the block is given")
        if type_of(portrait.slots[found[0]]) != type_of(node):
            raise Unsafe(region, f"{node.name} leaves block {region} with another type than it came in")
        return found[0]

    def _find(self, place: Place) -> Place:
        while self._parent.get(place, place) != place:
            place = self._parent[place]
        return place

    def _union(self, first: Place, second: Place) -> None:
        self._parent[self._find(first)] = self._find(second)


def _like(node: fx.Node) -> object:
    return type_of(node), annotation(node).phase
