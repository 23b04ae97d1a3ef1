"""Why the model is cut by depth, or why not: what the best pipeline takes, how much of it is waiting, what it saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.compiler.cluster.crossing import crossings
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.prices import Priced
from meshwright.compiler.search.state import Search
from meshwright.compiler.search.telling import memory, percent, seconds


def pipelines(found: Search) -> Iterator[str]:
    """One sentence or two, if a pipeline was priced."""
    members = _sorted(found, (p for p in found.priced if p.candidate.pipe > 1))
    if not members:
        return
    one = members[0]
    yield f"Pipelining over {one.candidate.pipe} ({_links(found, one.candidate)}): {_what(found, one)}"
    without = next(iter(_sorted(found, (p for p in found.priced if p.candidate.pipe == 1))), None)
    needed = not found.limits.pins.pipelined if without is None else not found.fits(without)
    if found.fits(one) and needed:
        yield "Nothing that was priced fits without a pipeline."
    elif found.fits(one) and without is not None:
        yield _compared(one, without)


def _sorted(found: Search, members: Iterable[Priced]) -> list[Priced]:
    """Those that fit by time, then the others by memory."""
    return sorted(members, key=lambda p: (not found.fits(p), p.seconds if found.fits(p) else p.memory))


def _links(found: Search, one: Candidate) -> str:
    crossed = crossings(found.cluster, Mesh(one.axes), (PIPE,))
    return "over " + " and ".join(c.tier.name for c in crossed) if crossed else "within a device"


def _what(found: Search, one: Priced) -> str:
    """What the best pipeline needs and takes."""
    flow = one.prediction.flow
    settings = f"{one.candidate.microbatches} microbatches, {one.candidate.schedule}"
    if one.candidate.virtual > 1:
        settings += f" with {one.candidate.virtual} stages on each rank"
    if one.candidate.save != "all":
        settings += f", {one.candidate.recompute} recomputation"
    if flow is None:
        return f"{settings}, {seconds(one.seconds)} a step."
    where = f"rank {flow.fullest} of the pipeline is the fullest"
    if not found.fits(one):
        over = memory(one.memory - found.capacity)
        return f"needs {memory(one.memory)} ({settings}), {over} too much; {where}."
    bubble = one.prediction.other.get("bubble", 0.0)
    return (
        f"fits with {memory(one.memory)} ({settings}; {where}): {seconds(one.seconds)} a step, of which its busiest "
        f"rank waits {seconds(bubble)} for others ({percent(flow.bubble)} bubble)."
    )


def _compared(one: Priced, without: Priced) -> str:
    """What the bubble costs, and what is gained for it."""
    more = one.seconds / without.seconds - 1
    relation = f"{percent(more)} slower than" if more > 0 else f"{percent(-more)} faster than"
    if without.seconds > 2 * one.seconds:
        relation = f"{without.seconds / one.seconds:.1f} times as fast as"
    bubble = one.prediction.other.get("bubble", 0.0)
    sent = _sent(without) - _sent(one)
    traded = f"it exposes {seconds(sent)} less communication" if sent > 0 else f"it exposes {seconds(-sent)} more of it"
    return (
        f"That is {relation} the best without a pipeline, {without.candidate} ({seconds(without.seconds)}): "
        f"for a bubble of {seconds(bubble)} {traded}."
    )


def _sent(one: Priced) -> float:
    return sum(one.prediction.exposed.values())
