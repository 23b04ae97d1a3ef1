"""What a check of causality says: verdict, leaks, witnesses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from meshwright.compiler.causality.second.opinion import Opinion
from meshwright.compiler.diagnostics import Diagnostic, Origin


class Verdict(StrEnum):
    """From best to worst; UNKNOWN stands aside."""

    CAUSAL = "CAUSAL"
    ROUNDING = "CAUSAL UP TO ROUNDING"
    ASSUMPTION = "CAUSAL UNDER ASSUMPTION"
    LEAK = "LEAK"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Witness:
    """Two batches that differ in tokens which an output must not see, and the outputs that differ.

    Positions are ``(row, time)``. ``batch_a`` and ``batch_b`` are in the form in which the model takes its batch.
    """

    kind: str
    """``future``, ``batch`` or ``document``."""
    output: tuple[int, int]
    input: tuple[int, int]
    """The changed position that matters; the first of several where none suffices alone."""
    batch_a: Any
    batch_b: Any
    tokens_a: tuple[Any, ...]
    """The row of ``input`` in the first run: ids, or the first feature of each position."""
    tokens_b: tuple[Any, ...]
    value_a: tuple[float, ...]
    """The first features of the output at ``output`` in the first run, in float64."""
    value_b: tuple[float, ...]
    difference: float
    """The largest difference at ``output``, relative to the largest element of the whole output."""
    own_weights: bool
    """Whether the model's weights were as given; else they were drawn anew, for special weights hide a leak."""
    segments: Any = None
    op: str = ""
    """The first op whose result at that position differs."""
    place: Origin | None = None
    calls: int = 0
    """How many calls must be made before, whose state shows it."""

    def text(self) -> str:
        weights = "the weights as they are" if self.own_weights else "weights drawn anew"
        weights += f", after {self.calls} calls" if self.calls else ""
        lines = [
            f"{self.kind}: the output at row {self.output[0]}, position {self.output[1]} changes with the input at "
            f"row {self.input[0]}, position {self.input[1]} ({weights})",
            f"  tokens of row {self.input[0]}: {_short(self.tokens_a)}",
            f"                    then: {_short(self.tokens_b)}",
            f"  output there: {_numbers(self.value_a)}",
            f"          then: {_numbers(self.value_b)}   (difference {self.difference:.1e} of the largest element)",
        ]
        if self.op and self.place is not None:
            where = f"{self.place.file}:{self.place.line}" if self.place.file else "outside the user's files"
            lines.append(f"  first differs in {self.op}, {where}" + (f": {self.place.text}" if self.place.text else ""))
        return "\n".join(lines)


@dataclass(frozen=True)
class Judgement:
    """The answer about one model."""

    verdict: Verdict
    leaks: frozenset[str]
    """Kinds of leak: ``future``, ``batch``, ``document``."""
    assumptions: tuple[str, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    findings: tuple[Diagnostic, ...] = ()
    reason: str = ""
    """Why the verdict is UNKNOWN."""
    action: str = ""
    """What to do about that."""
    lengths: tuple[int, ...] = ()
    """The lengths at which the analysis was made."""
    tests: int = 0
    """Pairs of runs that were compared."""
    second: Opinion | None = None
    """What the second reading says; it changes nothing of the verdict."""


_WORST = (Verdict.CAUSAL, Verdict.ROUNDING, Verdict.ASSUMPTION, Verdict.UNKNOWN, Verdict.LEAK)


def worse(one: Judgement, other: Judgement) -> Judgement:
    """Two judgements of the same model run in different ways as one: the worse verdict, with all that both found."""
    told = {(f.code, f.message) for f in one.findings}
    return Judgement(
        verdict=max(one.verdict, other.verdict, key=_WORST.index),
        leaks=one.leaks | other.leaks,
        assumptions=tuple(dict.fromkeys((*one.assumptions, *other.assumptions))),
        witnesses=(*one.witnesses, *(w for w in other.witnesses if w.kind not in {v.kind for v in one.witnesses})),
        findings=(*one.findings, *(f for f in other.findings if (f.code, f.message) not in told)),
        reason=one.reason or other.reason,
        action=one.action or other.action,
        lengths=tuple(sorted({*one.lengths, *other.lengths})),
        tests=one.tests + other.tests,
    )


def _short(values: tuple[Any, ...]) -> str:
    shown = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in values[:32]]
    return " ".join(shown) + (" ..." if len(values) > 32 else "")


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{v:+.6g}" for v in values[:4]) + (" ..." if len(values) > 4 else "")
