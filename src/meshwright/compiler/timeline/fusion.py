"""Which ops are one kernel, and what it reads and writes.

An op joins the kernel of an op that it reads, or that reads the same, if all are elementwise ops or reductions and
nothing that is launched apart lies on another way between them. A kernel reads what is made outside of it once, and
writes what is read outside. With ``kernels`` (written by hand) a sum that several ops read, such as that of the
residual stream, ends its kernel. In an update, all ops of a block between two waits are one kernel over many tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.compiler.summary import GraphSummary, Item, Kernel, Message

FUSIONS = ("none", "kernels", "compiled")
_FUSIBLE = ("elementwise", "reduction", "copy")
_MOVES = ("pack", "unpack", "pad")
"""Copies into and out of the buffers of messages are not fused with anything."""
_APART = ("aten._log_softmax.default", "aten._log_softmax_backward_data.default")
"""With ``kernels``, torch's own: kernels that are written by hand for a loss are ops of their own."""
_SUMS = ("aten.add.Tensor", "aten.sub.Tensor")


def fused(graph: GraphSummary, fusion: str) -> Mapping[int, Kernel]:
    """The kernels that are launched, by the position of their first op."""
    key = ("fused", fusion)
    if key not in graph.found:
        graph.found[key] = _fused(graph, fusion)
    found: Mapping[int, Kernel] = graph.found[key]
    return found


def joined(graph: GraphSummary, fusion: str) -> Sequence[Sequence[int]]:
    """The positions of ops that are one kernel together, two or more of them."""
    key = ("joined", fusion)
    if key not in graph.found:
        graph.found[key] = _joined_ops(graph, fusion)
    found: Sequence[Sequence[int]] = graph.found[key]
    return found


def read_by(graph: GraphSummary) -> Mapping[int, set[int]]:
    """By item: the items that read its result, also by way of views of it; the number of items if it leaves the
    graph."""
    _, whole, readers = _reading(graph)
    found = {position: set(read) for position, read in readers.items()}
    for position in graph.results:
        found.setdefault(whole[position], set()).add(len(graph.items))
    return found


def _fused(graph: GraphSummary, fusion: str) -> dict[int, Kernel]:
    kernels = {p: i.work for p, i in enumerate(graph.items) if isinstance(i.work, Kernel) and i.work.kind != "view"}
    if fusion == "none":
        return kernels
    kernels = {position: replace(kernel, parts=()) for position, kernel in kernels.items()}
    sources, whole, readers = _reading(graph)
    leaving = {whole[p] for p in graph.results}
    found = dict(kernels)
    for group in joined(graph, fusion):
        for position in group:
            del found[position]
        found[group[0]] = _kernel(graph.items, group, sources, readers, leaving)
    return found


def _joined_ops(graph: GraphSummary, fusion: str) -> list[list[int]]:
    if fusion == "none":
        return []
    sources, _, readers = _reading(graph)
    return [
        group
        for stretch in _between_waits(graph.items)
        for group in _groups(graph.items, stretch, sources, readers, fusion)
        if len(group) > 1
    ]


_Reading = tuple[list[tuple[int, ...]], list[int], dict[int, set[int]]]


def _reading(graph: GraphSummary) -> _Reading:
    """What :func:`_sources` and :func:`_readers` say of a graph."""
    if "reading" not in graph.found:
        sources, whole = _sources(graph.items)
        graph.found["reading"] = sources, whole, _readers(graph.items, sources)
    found: _Reading = graph.found["reading"]
    return found


def _sources(items: Sequence[Item]) -> tuple[list[tuple[int, ...]], list[int]]:
    """By item, what it reads, views replaced by what they are views of; and what a view is a view of."""
    whole: list[int] = []
    found: list[tuple[int, ...]] = []
    for position, item in enumerate(items):
        reads = tuple(whole[r] if r >= 0 else -1 for r in item.reads)
        found.append(reads)
        view = isinstance(item.work, Kernel) and item.work.kind == "view"
        whole.append(reads[0] if view and reads else position)
    return found, whole


def _readers(items: Sequence[Item], sources: Sequence[tuple[int, ...]]) -> dict[int, set[int]]:
    """By item, what reads its result, views apart."""
    found: dict[int, set[int]] = {}
    for position, reads in enumerate(sources):
        work = items[position].work
        if not (isinstance(work, Kernel) and work.kind == "view"):
            for read in reads:
                found.setdefault(read, set()).add(position)
    return found


def _between_waits(items: Sequence[Item]) -> Iterator[list[int]]:
    """Stretches of kernels of one block and phase in which the stream waits for nothing."""
    stretch: list[int] = []
    key: object = None
    for position, item in enumerate(items):
        work = item.work
        own = (item.block, item.phase, item.recomputed)
        if (isinstance(work, Message) and work.asynchronous) or (isinstance(work, Kernel) and work.kind == "view"):
            continue
        if stretch and (own != key or not isinstance(work, Kernel)):
            yield stretch
            stretch = []
        key = own
        if isinstance(work, Kernel):
            stretch.append(position)
    if stretch:
        yield stretch


@dataclass
class _Group:
    """Ops of one kernel, while it is put together."""

    members: list[int]
    bits: int
    """Of its number, and those of the groups that have been joined to it."""
    behind: int = 0
    """The bits of groups that it comes after by way of something outside of them."""
    closed: bool = False


def _groups(
    items: Sequence[Item],
    stretch: Sequence[int],
    sources: Sequence[tuple[int, ...]],
    readers: Mapping[int, set[int]],
    fusion: str,
) -> list[list[int]]:
    if items[stretch[0]].phase == "update":
        return [[p for p in stretch if _fusible(items[p], fusion)]]
    inside = set(stretch)
    group: dict[int, _Group] = {}
    behind: dict[int, int] = {}
    reading: dict[int, int] = {}  # by source: the op that read it last
    found: list[_Group] = []
    for position in stretch:
        reads = [r for r in sources[position] if r in inside]
        comes_after = 0
        for read in reads:
            comes_after |= behind[read]
        own: _Group | None = None
        if _fusible(items[position], fusion):
            sharing = [reading[s] for s in _large(items[position], sources[position]) if s in reading]
            for other in (*reads, *sharing):
                own = _joined(own, group.get(other), comes_after)
            if own is None:
                own = _Group([], 1 << len(found))
                found.append(own)
            own.members.append(position)
            for member in own.members:
                group[member] = own
            reading.update(dict.fromkeys(sources[position], position))
        for read in reads:
            if read in group and group[read] is not own:
                comes_after |= group[read].bits
        behind[position] = comes_after
        if own is not None:
            own.behind |= comes_after
            own.closed |= fusion == "kernels" and _ends(items, position, readers)
    return [sorted(g.members) for g in found if g.members]


def _joined(own: _Group | None, other: _Group | None, comes_after: int) -> _Group | None:
    """The group that an op joins, which comes after these bits: ``own`` with ``other`` if the two can be one kernel."""
    if other is None or other is own or other.closed or other.bits & comes_after:
        return own
    if own is None:
        return other
    if own.bits & other.behind or other.bits & own.behind:
        return own
    own.members += other.members
    own.bits |= other.bits
    own.behind |= other.behind
    other.members = []
    return own


def _large(item: Item, sources: Sequence[int]) -> list[int]:
    """What an op reads that is about as large as its result."""
    written = item.work.written if isinstance(item.work, Kernel) else 0
    return [s for s, size in zip(sources, item.read_bytes, strict=True) if s >= 0 and 2 * size >= written > 0]


def _fusible(item: Item, fusion: str) -> bool:
    work = item.work
    if not isinstance(work, Kernel) or (fusion == "kernels" and work.op in _APART):
        return False
    return work.kind in _FUSIBLE and work.op not in _MOVES


def _ends(items: Sequence[Item], position: int, readers: Mapping[int, set[int]]) -> bool:
    work = items[position].work
    same = [r for r in readers.get(position, ()) if items[r].phase == items[position].phase]
    return isinstance(work, Kernel) and work.op in _SUMS and len(same) > 1


def _kernel(
    items: Sequence[Item],
    group: Sequence[int],
    sources: Sequence[tuple[int, ...]],
    readers: Mapping[int, set[int]],
    leaving: set[int],
) -> Kernel:
    """One kernel for all ops of a group."""
    members = set(group)
    outside: dict[int, int] = {}
    given = read = written = 0
    flops = 0.0
    largest: Kernel | None = None
    for position in group:
        item = items[position]
        work = item.work
        assert isinstance(work, Kernel)
        flops += work.flops
        for source, size in zip(sources[position], item.read_bytes, strict=True):
            if source < 0:
                given += size
            elif source not in members:
                outside[source] = max(outside.get(source, 0), size)
        used = readers.get(position, set())
        if not used or used - members or position in leaving:
            written += work.written
        if largest is None or work.read + work.written > largest.read + largest.written:
            largest = work
    assert largest is not None
    read = given + sum(outside.values())
    kind = "reduction" if any(_is_reduction(items[p]) for p in group) else largest.kind
    return replace(largest, op="fused", kind=kind, flops=flops, read=read, written=written, parts=())


def _is_reduction(item: Item) -> bool:
    return isinstance(item.work, Kernel) and item.work.kind == "reduction"
