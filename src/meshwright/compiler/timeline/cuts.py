"""Where a pipeline is cut: stages of consecutive blocks, as even in time as they come, with what stands in no block
(embedding, head, loss) counted where it is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from meshwright.compiler.summary import PASSES, StagedSummary
from meshwright.compiler.timeline.stage import Shape, StagePricer


@dataclass(frozen=True)
class Depth:
    """The blocks of a whole model in the order of the forward pass, and by which block of a summary each is priced."""

    names: tuple[str, ...]
    like: tuple[str, ...]

    @cached_property
    def _home(self) -> dict[str, int]:
        """By block of the summary, the place of the block whose surroundings it shows: of several, the last one."""
        return {block: place for place, block in enumerate(self.like)}

    def homes(self, start: int, stop: int) -> frozenset[str]:
        """What stands in no block, of stages that have the blocks from ``start`` on, up to ``stop``."""
        return frozenset(block for block, place in self._home.items() if start <= place < stop)

    def shapes(self, starts: Sequence[int]) -> list[Shape]:
        """The shapes of stages; ``starts`` are the places of their first blocks, 0 first."""
        return [self._shape(start, stop) for start, stop in pairwise((*starts, len(self.names)))]

    def _shape(self, start: int, stop: int) -> Shape:
        counts: dict[str, int] = {}
        for block in self.like[start:stop]:
            counts[block] = counts.get(block, 0) + 1
        return Shape(tuple(counts.items()), self.homes(start, stop))

    def starts(self, first_blocks: Sequence[str]) -> tuple[int, ...]:
        """The places at which stages begin. Raises ValueError for a block that the model does not have."""
        return (0, *(self.names.index(name) for name in first_blocks))


def balanced(depth: Depth, pricer: StagePricer, placement: Sequence[int]) -> tuple[int, ...]:
    """The places at which stages begin; ``placement`` has the rank of each.

    With one stage on each rank the longest is as short as it can be, and of such cuts it is the most even one. With
    several, what counts is the rank that has most to do in all of them.
    """
    costs = block_seconds(depth, pricer)
    if len(set(placement)) == len(placement):
        return partition(costs, len(placement))
    return shared_out(costs, placement)


def block_seconds(depth: Depth, pricer: StagePricer) -> list[float]:
    """The seconds that each block adds to its stage, with what has its home there."""
    summary = pricer.summary
    each: dict[str, float] = {}
    around: dict[str, tuple[tuple[str, int], ...]] = {}
    for block in dict.fromkeys(depth.like):
        pair = next((pair for pair in summary.groups if block in pair), (block, block))
        several = pair[0] != pair[1]
        around[block] = ((pair[1], 1 + several),)
        alone = _seconds(pricer, Shape(around[block]))
        each[block] = _seconds(pricer, Shape(((pair[1], 3),))) - alone if several else alone
    found = [each[block] for block in depth.like]
    for home in _homes(summary):
        if home in around:
            place = max(i for i, block in enumerate(depth.like) if block == home)
            with_it = Shape(around[home], frozenset((home,)))
            found[place] += _seconds(pricer, with_it) - _seconds(pricer, Shape(around[home]))
    return found


def _homes(summary: StagedSummary) -> set[str]:
    return {item.home for graph in summary.passes.values() for item in graph.items}


def _seconds(pricer: StagePricer, shape: Shape) -> float:
    passes = pricer(shape).passes
    return sum(passes[kind].seconds for kind in PASSES)


def partition(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """The starts of consecutive parts, none empty: the dearest as cheap as possible, then the sum of squares.

    Raises ValueError if there are more parts than costs.
    """
    return partition_each([costs] * parts)


def partition_each(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The same where blocks cost something else in each part. Raises ValueError if there are more parts than blocks."""
    count, parts = len(costs[0]), len(costs)
    if parts > count:
        raise ValueError(f"{count} blocks cannot be cut into {parts} stages")
    totals = [[0.0, *accumulate(own)] for own in costs]
    longest = count if parts < 3 else min(count, 2 * (count // (parts - 1)) + 2)
    best: list[tuple[float, float, int]] = [(0.0, 0.0, -1), *([(float("inf"), 0.0, -1)] * count)]
    chosen: list[list[tuple[float, float, int]]] = []
    for part in range(1, parts + 1):
        found = [(float("inf"), 0.0, -1)] * (count + 1)
        for end in range(part, count - (parts - part) + 1):
            found[end] = min(_ways(best, totals[part - 1], part, end, longest), default=found[end])
        chosen.append(found)
        best = found
    starts = []
    end = count
    for found in reversed(chosen):
        end = found[end][2]
        starts.append(end)
    return tuple(reversed(starts))


def shared_out(costs: Sequence[float], placement: Sequence[int]) -> tuple[int, ...]:
    """The starts of consecutive parts, none empty, of which some are on one rank: every block goes to the rank that has
    least to do, as if all blocks between the first and the last were the same, and there to the shortest part.

    Raises ValueError if there are more parts than costs.
    """
    count, parts = len(costs), len(placement)
    if parts > count:
        raise ValueError(f"{count} blocks cannot be cut into {parts} stages")
    usual = sorted(costs)[count // 2]
    sizes = [1] * parts
    load = dict.fromkeys(placement, 0.0)
    for part, rank in enumerate(placement):
        # of the ends, what is there besides a usual block
        more = costs[0] if part == 0 else costs[-1] if part == parts - 1 else usual
        load[rank] += more
    for _ in range(count - parts):
        part = min(range(parts), key=lambda p: (float(f"{load[placement[p]]:.9g}"), sizes[p], -p))
        sizes[part] += 1
        load[placement[part]] += usual
    return (0, *accumulate(sizes[:-1]))


def _ways(
    best: Sequence[tuple[float, float, int]], total: Sequence[float], part: int, end: int, longest: int
) -> Iterator[tuple[float, float, int]]:
    """Parts that end there, with all before them."""
    for start in range(max(part - 1, end - longest), end):
        most, squares, _ = best[start]
        mine = total[end] - total[start]
        # what differs by rounding alone is the same
        yield float(f"{max(most, mine):.9g}"), squares + mine * mine, start
