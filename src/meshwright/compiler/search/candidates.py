"""All candidates that are legal for a program on a cluster and keep to what is pinned.

Storage is cut over all data ranks, or over those of one unit of the cluster (a node), with copies across units.
Tensor axes lie innermost, on the fastest links; where there are slower ones, layouts with the data axis inside are
there for comparison. Pipelines lie outermost, as they send least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from operator import mul

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.plan import PIPE, Save
from meshwright.compiler.schedules.catalogue import may_meet, meeting_schedule, modules, why_not
from meshwright.compiler.schedules.request import Request
from meshwright.compiler.search.candidate import DATA, REPLICA, SAVES, TENSOR, Candidate
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.pins import Pins

TABLE_ROWS = 16
"""Rows of a table for each rank below which cutting it alone is not worth its messages."""
EVERY = (1, 2, 4)
"""Full recomputation is tried in every so many blocks; that of cheap ops costs too little for a choice."""
MOST_PIPE = 64
"""Stages on ranks of their own, beyond which no pipeline is looked at that is not pinned."""
ROWS = 3
"""Of the numbers of microbatches that fill a pipeline, so many are looked at, those with the fewest samples first."""
USUAL, INTERLEAVED = "1f1b", "interleaved"
OUTDONE = ("gpipe", "breadth-first", "dualpipe", "list")
"""Schedules that are looked at only if they are pinned: those that take as long as others and hold more, the one that
holds all weights twice, and the one that takes a search of its own."""
MOST_VIRTUAL = 8
FULL = 4
"""Microbatches for each rank of a pipeline with which it waits for less than a fifth of a step: (p - 1) of 4 p + p - 1
passes."""
Axes = tuple[tuple[str, int], ...]


def candidates(
    facts: ProgramFacts, cluster: Cluster, ranks: int, pins: Pins | None = None, *, last_resort: bool = False
) -> Iterator[Candidate]:
    """The usual ones; with ``last_resort`` those that give up speed to save the last bytes: what is prefetched is
    gathered when it is needed, the optimizer state goes to the host. What only varies a good candidate
    (:func:`variants`) is left to its refinement, unless it is pinned."""
    pins = pins or Pins()
    for axes, storage in dict.fromkeys(shapes(facts, cluster, ranks, pins)):
        for count in _counts(Candidate(axes, storage).batch_ranks, facts, pins):
            for one in _options(Candidate(axes, storage, microbatches=count), facts, pins, last_resort):
                # with one microbatch and early reduction ZeRO-1 keeps no more than ZeRO-2: it is the same program
                twin = storage == 2 and count == 1 and one.prefetch > 0 and pins.storage is None
                if pins.allow(one) and not twin:
                    yield one
    for pipe in pipe_degrees(facts, ranks, pins):
        yield from _pipelines(facts, cluster, ranks, pipe, pins, last_resort)


def _pipelines(
    facts: ProgramFacts, cluster: Cluster, ranks: int, pipe: int, pins: Pins, last_resort: bool
) -> Iterator[Candidate]:
    """Candidates over so many stages. Parameters that are stored in shards would be gathered for every microbatch, and
    gradients be reduced, so that is left to pins and to the last resort."""
    name = pins.schedule or usual_schedule(facts, pins)
    virtual = pins.virtual or modules()[name].VIRTUAL
    if why_not(name, Request(pipe, pipe, virtual)) or pipe * virtual > facts.depth:
        return
    for axes, storage in dict.fromkeys(shapes(facts, cluster, ranks // pipe, pins)):
        if storage > 1 and pins.storage != storage and not (last_resort and storage == 3):
            continue
        base = Candidate(((PIPE, pipe), *axes), storage, schedule=name, virtual=virtual)
        if tuple(a for a in base.axes if a[0] == TENSOR) and axes[-1][0] != TENSOR and pins.tensor is None:
            continue
        for count in _filling(base, facts, pins):
            for one in _options(replace(base, microbatches=count), facts, pins, last_resort):
                if pins.allow(one):
                    yield one


def usual_schedule(facts: ProgramFacts, pins: Pins) -> str:
    """The schedule that pipelines are first looked at under."""
    several = (pins.virtual or 1) > 1
    if facts.meets and pins.microbatches != 1:
        return meeting_schedule(several)
    return INTERLEAVED if several else USUAL


def pipe_degrees(facts: ProgramFacts, ranks: int, pins: Pins) -> list[int]:
    """Over how many ranks the model may be cut by depth."""
    if facts.coupled and pins.microbatches != 1:
        return []
    if pins.pipe is not None:
        return [pins.pipe] if pins.pipe > 1 and ranks % pins.pipe == 0 and pins.pipe <= facts.depth else []
    return [n for n in divisors(ranks) if 1 < n <= min(facts.depth, MOST_PIPE)]


def _filling(base: Candidate, facts: ProgramFacts, pins: Pins) -> list[int]:
    """Numbers of microbatches that fill a pipeline, the largest first."""
    counts = _counts(base.batch_ranks, facts, pins)
    enough = [count for count in counts if count >= base.pipe]
    if pins.pipelined and not enough:
        enough = counts
    return enough[: -ROWS - 1 : -1]


def schedules(one: Candidate, facts: ProgramFacts, pins: Pins) -> Iterator[Candidate]:
    """The same pipeline under all other schedules that are worth looking at."""
    for name, module in modules().items():
        meeting = one.microbatches > 1 and bool(facts.meets)
        outdone = OUTDONE[-1:] if meeting else OUTDONE
        if (pins.schedule is None and name in outdone) or pins.schedule not in (None, name):
            continue
        exact = getattr(module, "EXACT", False)
        most = min(MOST_VIRTUAL, facts.depth // one.pipe)
        usual = [module.VIRTUAL] if exact else [v for v in (2, 3, 4, 6, 8) if v <= most]
        for virtual in usual if pins.virtual is None else [pins.virtual]:
            other = replace(one, schedule=name, virtual=virtual)
            fits = virtual * one.pipe <= facts.depth
            request = Request(one.pipe, one.pipe, virtual)
            if other != one and fits and not why_not(name, request) and (not meeting or may_meet(name, request)):
                yield other


def variants(one: Candidate, facts: ProgramFacts, pins: Pins) -> Iterator[Candidate]:
    """What may be a little better or simpler than a good candidate."""
    if one.size(TENSOR) > 1:
        changed = [replace(one, sequence=not one.sequence)]
        if "vocabulary" in facts.cuts and len(facts.cuts) > 1:
            changed.append(replace(one, whole=() if one.whole else ("vocabulary",)))
        yield from (c for c in changed if pins.allow(c))


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def tensor_degrees(facts: ProgramFacts, ranks: int) -> list[int]:
    """The degrees of tensor parallelism that cut everything evenly: heads, and key/value heads or the ranks that
    share one; inner widths. Others are legal, with padding, but are tried only when a pin asks for them."""
    return [n for n in divisors(ranks) if n == 1 or divides(facts, n)]


def divides(facts: ProgramFacts, degree: int) -> bool:
    """Whether so many ranks of tensor parallelism cut heads and inner widths evenly."""
    groups = facts.key_value_heads or facts.heads
    others = [size for name, size in facts.cuts.items() if name != "vocabulary"]
    least = degree if others else TABLE_ROWS * degree  # a short table is left whole where there is more to cut
    if not facts.cuts or any(size < least for size in others or facts.cuts.values()):
        return False
    if facts.heads and (facts.heads % degree or (groups % degree and degree % groups)):
        return False
    return facts.cuts.get("inner", degree) % degree == 0


def shapes(facts: ProgramFacts, cluster: Cluster, ranks: int, pins: Pins) -> Iterator[tuple[Axes, int]]:
    """Mesh axes with the ZeRO level, for so many ranks."""
    units = [u for u in accumulate((tier.size for tier in cluster.tiers), mul) if 1 < u < ranks]
    for degree in [pins.tensor] if pins.tensor else tensor_degrees(facts, ranks):
        if ranks % degree:
            continue
        over = ranks // degree
        tiered = degree > 1 and bool(units)  # else all layouts are the same links
        yield _axes((REPLICA, over), (TENSOR, degree)), 0
        if tiered:
            yield _axes((TENSOR, degree), (REPLICA, over)), 0
        inside = {over, *(u // degree for u in units if u % degree == 0), *units, *([pins.data] if pins.data else [])}
        if pins.replica and over % pins.replica == 0:
            inside.add(over // pins.replica)
        if pins.copies and pins.storage:
            inside.update(n for n in divisors(over) if n < over)
        for data in sorted(n for n in inside if n > 1 and over % n == 0):
            for level in (1, 2, 3):
                copies = (REPLICA, over // data)
                yield _axes(copies, (DATA, data), (TENSOR, degree)), level
                if tiered:
                    yield _axes(copies, (TENSOR, degree), (DATA, data)), level


def _axes(*axes: tuple[str, int]) -> Axes:
    return tuple((name, size) for name, size in axes if size > 1)


def microbatch_counts(batch: int, ranks: int) -> list[int]:
    """Microbatches of which every rank gets a sample, all the same number where the batch allows it."""
    each = [m for m in divisors(batch) if batch // m >= ranks]
    even = [m for m in each if (batch // m) % ranks == 0]
    return even or each


def filling_microbatches(batch: int, ranks: int, pipe: int) -> int:
    """The microbatches of a pipeline of which nothing is said: the fewest that fill it (:data:`FULL`), or as many as
    give each of the ``ranks`` that cut the batch the same number of samples."""
    counts = microbatch_counts(batch, ranks) or [1]
    return next((count for count in counts if count >= FULL * pipe), counts[-1])


def _counts(ranks: int, facts: ProgramFacts, pins: Pins) -> list[int]:
    pinned = pins.microbatches
    if facts.coupled:
        return [1] if facts.batch >= ranks and pinned in (None, 1) else []
    if pinned is None:
        return microbatch_counts(facts.batch, ranks)
    return [pinned] if facts.batch % pinned == 0 and facts.batch // pinned >= ranks else []


def _options(base: Candidate, facts: ProgramFacts, pins: Pins, last_resort: bool) -> Iterator[Candidate]:
    """The same shape with all ways to save memory and to hide communication."""
    cut = base.size(TENSOR) > 1
    usual = int(base.ranks > 1 and (base.pipe == 1 or base.storage == 3))
    saves: Iterable[Save] = list(SAVES) if facts.blocks else ["all"]
    ways = [(save, every) for save in saves if pins.allows_save(save) for every in _everies(save, facts, pins)]
    for save, every in ways:
        for prefetch in [0 if last_resort else usual] if pins.prefetch is None else [pins.prefetch]:
            for offload in _offloads(facts, pins, last_resort):
                yield replace(
                    base,
                    sequence=cut if pins.sequence is None else pins.sequence and cut,
                    save=save,
                    every=every,
                    prefetch=prefetch,
                    offload=offload,
                    whole=(pins.whole or ()) if cut else (),
                    by_stage=bool(pins.by_stage) and base.pipe > 1 and save != "all" and every == 1,
                )


def _everies(save: Save, facts: ProgramFacts, pins: Pins) -> list[int]:
    """In every how many blocks: a few numbers, between which the refinement looks further."""
    if save == "all":
        return [1]
    if pins.every is not None:
        return [pins.every]
    return [every for every in EVERY if every == 1 or (save == "nothing" and 2 * every <= facts.depth)]


def _offloads(facts: ProgramFacts, pins: Pins, last_resort: bool) -> list[bool]:
    if pins.offload is not None:
        return [pins.offload]
    return [False, True] if last_resort and facts.state else [False]
