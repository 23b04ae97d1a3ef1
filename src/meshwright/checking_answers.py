"""The questions that ``meshwright check`` asks, and what it is answered: of a model, and of the step that trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.checking import checked
from meshwright.checking_source import Given
from meshwright.compiler.causality.clock import Clock
from meshwright.compiler.causality.judge import judge
from meshwright.compiler.causality.rank_findings import mended_finding
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError
from meshwright.compiler.drift.judge import drift_within
from meshwright.compiler.emit.artefact import read_artefact
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.numerics import findings as numerics_findings
from meshwright.compiler.passes import separability
from meshwright.compiler.passes.verify_end import verify_end
from meshwright.compiler.plan import Plan
from meshwright.equivalence import verify_equivalence
from meshwright.frontend.source import Source
from meshwright.rank_causality import leaks_alone, read_ranks
from meshwright.runtime.materialize import from_safetensors

UNKNOWN = "UNKNOWN"
"""The headline of a question that has no answer."""


@dataclass(frozen=True)
class Answer:
    """To one question. One that could not be answered is not passed."""

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
            "findings": [f.plain() for f in self.findings],
            **self.detail,
        }


def causality(given: Given, clock: Clock) -> Answer:
    """Do outputs see later tokens, other rows, other documents?"""
    found = checked(
        judge(
            given.model,
            given.batch,
            batch_dim=given.batch_dim,
            time_dim=given.time_dim,
            segments=given.segments,
            clock=clock,
        )
    )
    return Answer(found.passed, found.headline(), found.findings, found.footline(), found.json())


def drifts(given: Given, clock: Clock) -> Answer:
    """Does what is used, in evaluation, with a cache, at another length, compute what was trained?"""
    found = drift_within(clock, given.model, given.batch, given.batch_dim, given.time_dim)
    return Answer(found.passed, found.headline(), found.findings, found.footline(), found.json())


def not_captured(given: Given, clock: Clock) -> Answer:
    """What is asked of a training step that cannot be captured: it is not known."""
    assert given.fault is not None
    return Answer(False, UNKNOWN, given.fault.diagnostics)


def separable(given: Given, clock: Clock) -> Answer:
    """May the step be cut over its batch? Fails for an artefact with microbatches if a coupling is not declared."""
    step = given.step
    program = step if isinstance(step, StepProgram) else step.program
    misses = tuple(separability.without_fit(program, given.declarations))
    found = separability.findings(program, given.declarations)
    may_be_cut = isinstance(step, StepProgram) or step.plan.microbatches == 1 or not found
    said = f"{len(found)} lines couple the samples of a batch; over data ranks they mean the whole batch"
    if not found:
        said = "the step may be cut over its batch in any way"
    if misses:
        said += f"; {len(misses)} declarations fit no line that couples"
    return Answer(may_be_cut and not misses, said, (*misses, *(replace(one, warns=may_be_cut) for one in found)))


def numerics(given: Given, clock: Clock) -> Answer:
    """What does half precision cost? Fails for errors of several roundings or more."""
    found = numerics_findings(given.step)
    grave = sum(one.grave for one in found)
    headline = "no sum loses more than a rounding" if not found else f"{len(found)} findings, {grave} of them grave"
    return Answer(not grave, headline, tuple(replace(one.diagnostic, warns=not one.grave) for one in found))


def end(given: Given, clock: Clock) -> Answer:
    """Do all ranks of what was compiled come to an end?"""
    step = given.step
    assert not isinstance(step, StepProgram)
    try:
        verify_end(step)
    except MeshwrightError as fault:
        return Answer(False, "ranks wait for one another for ever", fault.diagnostics)
    return Answer(True, f"all {step.plan.mesh.ranks} ranks come to an end")


def equivalence(given: Given, clock: Clock) -> Answer:
    """Do the ranks compute what one device computes? By relations, and by numbers of all ranks or of the miniature."""
    assert given.artefact is not None
    found = verify_equivalence(given.artefact)
    related = found.relations
    said = f"all {related.values} values related" if related.proved else f"{len(related.findings)} findings"
    if related.apart:
        said = found.related
    if found.numbers is not None:
        ranks = f"{found.numbers.ranks} {'ranks of the miniature' if found.miniature else 'virtual ranks'}"
        said += f"; {ranks} differ from one device by {found.numbers.worst:.1e}"
    return Answer(found.passed, said, tuple(found.diagnostics()), "\n".join(found.notes))


def causality_of_ranks(given: Given, clock: Clock) -> Answer:
    """Do outputs of the ranks' programs see what they see on one device, and nothing else?"""
    assert given.artefact is not None
    artefact = read_artefact(given.artefact)
    path = artefact.tensors.get("initial")
    found = read_ranks(artefact.rank_program, from_safetensors(path) if path is not None else None)
    if found is None:
        return Answer(True, "not asked: no tensor of the batch has positions")
    findings = found.findings
    source = given.made_anew
    if found.passed and found.leaks and source is not None:
        findings = _mended(source, artefact.rank_program.plan, found.leaks, with_values=path is not None)
    return Answer(not findings, found.headline(), findings, found.footline(), found.json())


def _mended(source: Source, plan: Plan, leaks: frozenset[str], *, with_values: bool) -> tuple[Diagnostic, ...]:
    """Whether the source leaks as what was compiled of it. ``with_values``: buffers are known, as they were there."""
    values = source.weights() if with_values else {}
    try:
        gone = leaks - leaks_alone(source.capture(), plan, (lambda name, spec: values[name]) if values else None)
    except MeshwrightError as fault:
        return (mended_finding(leaks, f"it is not known whether it leaks: {fault.diagnostics[0].message}"),)
    return (mended_finding(gone),) if gone else ()


Ask = Callable[[Given, Clock], Answer]
OF_MODELS: Mapping[str, Ask] = {"causality": causality, "drift": drifts}
"""What is asked of a model, in order."""
OF_STEPS: Mapping[str, Ask] = {"separability": separable, "numerics": numerics}
"""What is asked of a training step, for one device or compiled."""
OF_ARTEFACTS: Mapping[str, Ask] = {
    "causality of ranks": causality_of_ranks,
    "equivalence": equivalence,
    "deadlock": end,
}
"""What is asked of what was compiled."""


def questions(given: Given) -> dict[str, Ask]:
    """Those that can be asked of what is given."""
    found = dict(OF_MODELS)
    if given.fault is not None:
        found |= dict.fromkeys(OF_STEPS, not_captured)
    elif given.without_step is None:
        found |= OF_STEPS
    if given.artefact is not None:
        found |= OF_ARTEFACTS
    return found
