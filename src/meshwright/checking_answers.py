"""The questions that ``meshwright check`` asks, and what it is answered: of a model, and of the step that trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.checking import check
from meshwright.checking_report import findings_as_json
from meshwright.checking_source import Given
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.numerics import findings as numerics_findings
from meshwright.compiler.passes.verify_end import verify_end


@dataclass(frozen=True)
class Answer:
    """To one question."""

    passed: bool
    headline: str
    findings: tuple[Diagnostic, ...] = ()
    footline: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """What the question has to say besides, as plain data."""

    def json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "passed": self.passed,
            "headline": self.headline,
            "findings": findings_as_json(self.findings),
            **self.detail,
        }


def causality(given: Given) -> Answer:
    """Do outputs see later tokens, other rows, other documents?"""
    found = check(given.model, given.batch, batch_dim=given.batch_dim, time_dim=given.time_dim, segments=given.segments)
    return Answer(found.passed, found.headline(), found.findings, found.footline(), found.json())


def numerics(given: Given) -> Answer:
    """What does half precision cost? Fails for errors of several roundings or more."""
    found = numerics_findings(given.step)
    grave = sum(one.grave for one in found)
    headline = "no sum loses more than a rounding" if not found else f"{len(found)} findings, {grave} of them grave"
    return Answer(not grave, headline, tuple(one.diagnostic for one in found))


def end(given: Given) -> Answer:
    """Do all ranks of what was compiled come to an end?"""
    step = given.step
    assert not isinstance(step, StepProgram)
    try:
        verify_end(step)
    except MeshwrightError as fault:
        return Answer(False, "ranks wait for one another for ever", fault.diagnostics)
    return Answer(True, f"all {step.plan.mesh.ranks} ranks come to an end")


Ask = Callable[[Given], Answer]
OF_MODELS: Mapping[str, Ask] = {"causality": causality}
"""What is asked of a model, in order."""
OF_STEPS: Mapping[str, Ask] = {"numerics": numerics}
"""What is asked of a training step, for one device or compiled."""
OF_ARTEFACTS: Mapping[str, Ask] = {"deadlock": end}
"""What is asked of what was compiled."""


def questions(given: Given) -> dict[str, Ask]:
    """Those that can be asked of what is given."""
    found = dict(OF_MODELS)
    if given.without_step is None:
        found |= OF_STEPS
    if given.artefact is not None:
        found |= OF_ARTEFACTS
    return found
