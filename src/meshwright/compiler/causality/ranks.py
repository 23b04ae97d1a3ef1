"""What a step sees on many ranks beside what it sees on one: what must not be seen, and what is not the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.compiler.causality.rank_findings import (
    Difference,
    difference_finding,
    nowhere_finding,
    unknown_finding,
    unread_finding,
)
from meshwright.compiler.causality.readings import Apart, First, Points, Whole, first_node, forward_nodes
from meshwright.compiler.causality.tokens import Numbering
from meshwright.compiler.causality.verdict import Verdict
from meshwright.compiler.causality.words import any_over
from meshwright.compiler.diagnostics import Diagnostic, Origin
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import annotation


@dataclass(frozen=True)
class Side:
    """A program, where its outputs are read, and what its values depend on."""

    compiled: Compiled
    points: Points
    whole: Whole
    unknown: Mapping[str, Origin] = field(default_factory=dict)
    """The ops without a rule that were met, in the order of their bits."""

    def of(self, name: str) -> list[Tensor]:
        """The sets of each copy of the values of a name."""
        return [copy for node in forward_nodes(self.compiled) if node.name == name for copy in self.whole(node)]


def verdict_of(side: Side, numbers: Numbering) -> tuple[Verdict, frozenset[str]]:
    """What outputs of one side see, and the kinds of leaks. What is seen by way of a choice alone is an assumption."""
    leaks: set[str] = set()
    soft = unknown = False
    names = [name for name in side.points.verdict_names if name]
    for name in names:
        for copy in side.of(name):
            sets = sets_of(copy, numbers)
            unknown = unknown or bool(_blind(sets, numbers).any())
            leaks |= _kinds(numbers.seen(sets, soft=False), numbers)
            soft = soft or bool(_kinds(numbers.seen(sets), numbers))
    if leaks:
        return Verdict.LEAK, frozenset(leaks)
    if unknown or not any(side.of(name) for name in names):
        return Verdict.UNKNOWN, frozenset()
    return (Verdict.ASSUMPTION if soft else Verdict.CAUSAL), frozenset()


def _kinds(seen: Tensor, numbers: Numbering) -> set[str]:
    """Of ``[rows, positions, bits]``: the kinds of what must not be seen and is."""
    made = set()
    for row in range(seen.shape[0]):
        if bool((seen[row] & numbers.forbidden("batch", row, 0)).any()):
            made.add("batch")
        for time in range(seen.shape[1]) if row in numbers.told else ():
            if bool((seen[row, time] & numbers.forbidden("future", row, time)).any()):
                made.add("future")
    return made


def sets_of(whole: Tensor, numbers: Numbering) -> Tensor:
    """``[rows, positions, words]`` of the sets of a value that has a dim of each, or one of both."""
    rows = numbers.rows
    if whole.shape[0] != rows or whole.dim() < 3:
        whole = whole.reshape(rows, whole.shape[0] // rows, *whole.shape[1:])
    return any_over(whole, range(2, whole.dim() - 1))


def _blind(sets: Tensor, numbers: Numbering) -> Tensor:
    """Where a value depends on the result of an op without a rule: its set says more than is."""
    return numbers.seen(sets)[..., list(numbers.free)].any(-1)


def not_known(alone: Side, ranks: Side, numbers: Numbering) -> tuple[Diagnostic, ...]:
    """What is not known of outputs: ops without a rule that they depend on, or that there are none."""
    if not any(alone.of(name) for name in alone.points.verdict_names if name):
        return (nowhere_finding(),)
    found: dict[str, Origin] = {}
    for side in (alone, ranks):
        met: set[int] = set()
        for name in side.points.names():
            for copy in side.of(name):
                met |= _bits(copy, numbers)
        for op, bit in zip(side.unknown, numbers.free, strict=False):
            if bit in met:
                nodes = (
                    n for n in forward_nodes(side.compiled) if any(bit in _bits(c, numbers) for c in side.whole(n))
                )
                found.setdefault(op, next((annotation(n).origin for n in nodes), Origin()))
    return (unknown_finding(found),) if found else ()


def _bits(sets: Tensor, numbers: Numbering) -> set[int]:
    seen = numbers.seen(any_over(sets.reshape(-1, sets.shape[-1]), (0,)))
    return {bit for bit in numbers.free if bool(seen[bit])}


def _apart(numbers: Numbering, *, less: bool) -> Apart:
    """Of what ranks see and what one device sees: what one alone does, where both are known."""

    def apart(there: Tensor, here: Tensor) -> Tensor:
        sets = here & ~there if less else there & ~here
        if not bool(sets.any()):
            return sets
        return torch.where((_blind(there, numbers) | _blind(here, numbers)).unsqueeze(-1), 0, sets)

    return apart


def differences(alone: Side, ranks: Side, numbers: Numbering, *, less: bool) -> tuple[Diagnostic, ...]:
    """What outputs of the ranks see of tokens and labels that they do not see on one device, and with ``less`` what
    they see no longer; one of each. If outputs are the same, the first value on the way that is not. What either side
    does not know is not compared."""
    kinds = {"more": _apart(numbers, less=False)} | ({"less": _apart(numbers, less=True)} if less else {})
    wrong: dict[str, Tensor] = {}
    found: list[Diagnostic] = []
    for name, other in alone.points.pairs(ranks.points):
        (whole, *_), copies = alone.of(name), ranks.of(other) if other else []
        if not copies or any(c.numel() != whole.numel() for c in copies):
            return (unread_finding(name),)
        for copy in copies:
            copy = copy.reshape(whole.shape)
            for kind, apart in kinds.items():
                sets = apart(copy, whole)
                if bool(sets.any()):
                    wrong.setdefault(kind, sets)
    for kind, apart in kinds.items():
        first = first_node(
            list(forward_nodes(alone.compiled)),
            list(forward_nodes(ranks.compiled)),
            alone.whole,
            ranks.whole,
            ranks.points,
            apart,
        )
        if kind in wrong:
            found.append(_told(kind, wrong[kind], numbers, first))
        elif first is not None and not wrong:
            found.append(difference_finding(Difference(kind, "", "", "", first)))
    return tuple(found)


def _told(kind: str, sets: Tensor, numbers: Numbering, first: First | None) -> Diagnostic:
    """One difference of outputs, and the first node in which there is one."""
    seen = numbers.seen(sets_of(sets, numbers))
    row, time, bit = seen.nonzero()[0].tolist()
    later = next((k for k in ("future", "batch") if numbers.forbidden(k, row, time)[bit]), "")
    output = f"the output at row {row}, position {time}"
    return difference_finding(Difference(kind, output, numbers.named(bit), later, first))
