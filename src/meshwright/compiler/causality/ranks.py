"""What a step sees on many ranks beside what it sees on one: what must not be seen, and what is not the same."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshwright.compiler.causality.rank_findings import Difference, difference_finding, unread_finding
from meshwright.compiler.causality.readings import First, Points, Whole, first_node, forward_nodes
from meshwright.compiler.causality.tokens import Numbering
from meshwright.compiler.causality.verdict import Verdict
from meshwright.compiler.causality.words import any_over
from meshwright.compiler.diagnostics import Diagnostic
from meshwright.compiler.graph.pipeline_program import Compiled


@dataclass(frozen=True)
class Side:
    """A program, where its outputs are read, and what its values depend on."""

    compiled: Compiled
    points: Points
    whole: Whole

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
            unknown = unknown or bool(numbers.seen(sets)[..., list(numbers.free)].any())
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


def differences(alone: Side, ranks: Side, numbers: Numbering, *, less: bool) -> tuple[Diagnostic, ...]:
    """What outputs of the ranks see of tokens and labels that they do not see on one device, and with ``less`` what
    they see no longer; one of each. If outputs are the same, the first value on the way that is not."""
    wrong: dict[str, Tensor] = {}
    found: list[Diagnostic] = []
    for name, other in alone.points.pairs(ranks.points):
        (whole, *_), copies = alone.of(name), ranks.of(other) if other else []
        if not copies or any(c.numel() != whole.numel() for c in copies):
            return (unread_finding(name),)
        for copy in copies:
            copy = copy.reshape(whole.shape)
            for kind, sets in (("more", copy & ~whole), ("less", whole & ~copy)):
                if (kind == "more" or less) and bool(sets.any()):
                    wrong.setdefault(kind, sets)
    for kind in ("more", "less") if less else ("more",):
        first = first_node(
            list(forward_nodes(alone.compiled)),
            list(forward_nodes(ranks.compiled)),
            alone.whole,
            ranks.whole,
            ranks.points,
            less=kind == "less",
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
