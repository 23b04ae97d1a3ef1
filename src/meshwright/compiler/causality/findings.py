"""The diagnostics of a judgement: E0711 to E0715, W0714, W0716."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from meshwright.compiler.causality.interpreter import Notes
from meshwright.compiler.causality.relation import Flag
from meshwright.compiler.causality.second.opinion import Opinion
from meshwright.compiler.causality.verdict import Judgement, Verdict
from meshwright.compiler.diagnostics import Diagnostic

CODES = {"future": "E0711", "batch": "E0712", "document": "E0713"}
_WHAT = {
    "future": "an output depends on a later token of its row",
    "batch": "an output depends on another row of the batch",
    "document": "an output depends on another document of its row",
}
NO_NUMBERS = "all outputs are infinite or no numbers"
NO_TIME = "there was no time to try each place that the analysis flags"
_UNKNOWN = {
    NO_NUMBERS: "give weights and a batch with which the outputs are numbers",
    NO_TIME: "allow more seconds, or give a smaller batch",
}
"""What to do, by the reason why nothing is known."""
_ACTION = {
    "future": "mask what comes after each position, before anything joins positions",
    "batch": "compute each row by itself: no statistics, capacity or order over the batch",
    "document": "mask by segment ids, and start positions, convolutions and states anew with each document",
}


def findings_of(judgement: Judgement, flags: Mapping[str, Flag], notes: Notes) -> Judgement:
    """The judgement with its diagnostics."""
    found = []
    for kind in sorted(judgement.leaks):
        witness = next((w for w in judgement.witnesses if w.kind == kind), None)
        lines = tuple(witness.text().splitlines()) if witness else _static(flags[kind])
        place = witness.place if witness and witness.place and witness.place.file else None
        found.append(Diagnostic(CODES[kind], _WHAT[kind], place, _ACTION[kind], tuple(x.strip() for x in lines)))
    for sentence in judgement.assumptions:
        known = sentence in notes.assumptions
        action = "mask with -inf, or make sure that it holds" if known else "make sure that it holds"
        found.append(Diagnostic("W0714", f"causal only if {sentence}", notes.assumptions.get(sentence), action))
    if judgement.verdict is Verdict.UNKNOWN:
        place = next(iter(notes.unknown.values()), None)
        action = "write it in ops that have rules, or add one to compiler/causality/ops"
        if not notes.unknown:
            action = judgement.action or _UNKNOWN.get(
                judgement.reason, "give a batch that the model takes, and say its dims"
            )
        found.append(Diagnostic("E0715", f"causality is not known: {judgement.reason}", place, action))
    if judgement.verdict is Verdict.ROUNDING:
        found.append(
            Diagnostic(
                "W0716",
                "what must not be seen cancels out, but for rounding",
                action="compute each position from what it may see, rather than subtract the rest",
            )
        )
    return replace(judgement, findings=tuple(found))


def with_second(judgement: Judgement, second: Opinion) -> Judgement:
    """The judgement with the second reading beside it, and E0793 where they contradict each other."""
    found = contradictions(judgement.leaks - {"document"}, second)
    return replace(judgement, second=second, findings=(*judgement.findings, *found))


def contradictions(leaks: Collection[str], second: Opinion, where: str = "") -> tuple[Diagnostic, ...]:
    """E0793 where the second reading proves what a leak disproves. ``where``: of what, if not of the model."""
    if second.verdict != "CAUSAL" or not leaks:
        return ()
    said = f"LEAK ({', '.join(sorted(leaks))}) and {second.headline()}"
    return (
        Diagnostic(
            "E0793",
            f"two readings of causality{where} contradict each other: {said}",
            action="this is a fault of Meshwright; please send the model. The leak counts, if it has a witness",
        ),
    )


def _static(flag: Flag) -> tuple[str, ...]:
    return (
        f"position {flag.output[1]} of row {flag.output[0]} is joined with position {flag.source[1]} of row "
        f"{flag.source[0]}; no tokens that were tried show it",
    )
