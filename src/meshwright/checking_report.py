"""A check as text, JSON and SARIF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright import __version__
from meshwright.compiler.diagnostics import Diagnostic

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


def as_sarif(findings: Sequence[Diagnostic], failed: Sequence[Diagnostic] | None = None) -> dict[str, Any]:
    """A SARIF 2.1.0 log of one run with one result for each finding. ``failed`` says why a check was not made."""
    results = []
    for finding in findings:
        result: dict[str, Any] = {"ruleId": finding.code, "level": finding.kind, "message": _message(finding)}
        results.append(result | _locations(finding))
    rules = [{"id": code} for code in sorted({f.code for f in (*findings, *(failed or ()))})]
    driver = {"name": "meshwright", "version": __version__, "rules": rules}
    run: dict[str, Any] = {"tool": {"driver": driver}, "results": results}
    told = [
        {"descriptor": {"id": f.code}, "level": f.kind, "message": _message(f), **_locations(f)} for f in failed or ()
    ]
    run["invocations"] = [{"executionSuccessful": failed is None, "toolExecutionNotifications": told}]
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _message(finding: Diagnostic) -> dict[str, str]:
    return {"text": "\n".join([finding.message, *finding.notes])}


def _locations(finding: Diagnostic) -> dict[str, Any]:
    file, line = finding.file_and_line
    if not file:
        return {}
    region = {"startLine": max(line, 1)}
    return {"locations": [{"physicalLocation": {"artifactLocation": {"uri": file}, "region": region}}]}
