"""A check as text and as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.checking import Checked
    from meshwright.compiler.causality.verdict import Witness


def as_text(checked: Checked) -> str:
    """The verdict first."""
    return "\n".join([checked.headline(), *(finding.render() for finding in checked.findings), ground(checked)])


def ground(checked: Checked) -> str:
    """At which lengths was analysed, how much was run."""
    detail = checked.causality
    lengths = ", ".join(str(n) for n in detail.lengths) or "none"
    lines = [f"analysed at lengths {lengths}; {detail.tests} pairs of runs compared"]
    if detail.second is not None:
        lines.append(f"second reading: {detail.second.headline()}")
    return "\n".join(lines)


def as_json(checked: Checked) -> dict[str, Any]:
    """Plain data."""
    return {
        "verdict": str(checked.verdict),
        "leaks": sorted(checked.leaks),
        "assumptions": list(checked.assumptions),
        "reason": checked.causality.reason,
        "lengths": list(checked.causality.lengths),
        "pairs": checked.causality.tests,
        "second": checked.causality.second.json() if checked.causality.second is not None else None,
        "witnesses": [_witness(w) for w in checked.witnesses],
        "findings": [f.plain() for f in checked.findings],
    }


def _witness(witness: Witness) -> dict[str, Any]:
    place = witness.place
    return {
        "kind": witness.kind,
        "output": list(witness.output),
        "input": list(witness.input),
        "tokens": [list(witness.tokens_a), list(witness.tokens_b)],
        "outputs": [list(witness.value_a), list(witness.value_b)],
        "difference": witness.difference,
        "own_weights": witness.own_weights,
        "op": witness.op,
        "file": place.file if place else "",
        "line": place.line if place else 0,
    }
