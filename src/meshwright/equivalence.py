"""Whether a compiled step is the step for one device: by relations, and by the numbers of a miniature or of all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.bisection import bisect
from meshwright.compiler.diagnostics import Diagnostic
from meshwright.compiler.emit.artefact import read_artefact
from meshwright.compiler.equivalence.check import Relations, check_relations
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import StepProgram
from meshwright.miniature import verify_miniature
from meshwright.verification import TOLERANCE, Verification, verify_artefact

SMALL = 1 << 25
"""Elements of all ranks' weights up to which all ranks are run as they are."""
TOLD = 5
"""Findings that are told, at most: what is wrong early is wrong in what follows."""
SETTLED = "nothing has to be done: the numbers were compared, and agree"


@dataclass(frozen=True)
class Verdict:
    """What relations and numbers say. ``numbers``: of the ``miniature``, or of all ranks; None: none were compared."""

    relations: Relations
    numbers: Verification | None = None
    miniature: bool = False
    notes: tuple[str, ...] = field(default=())
    broken_by: str = ""
    """Which pass makes it another step, and where."""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong: what relations cannot tell, numbers must have told. Where there are no relations to
        find, numbers alone decide, if they are asked for."""
        wrong = bool(self.relations.findings) and not (self.relations.undecided and self.numbers is not None)
        return not wrong and (self.numbers is None or self.numbers.passed)

    @property
    def related(self) -> str:
        """What the relations say, in a line."""
        if self.relations.apart:
            compared = "numbers alone" if self.numbers is not None else "nothing was compared: numbers alone"
            return f"relations do not apply: {self.relations.apart}; {compared} decide"
        values = f"{self.relations.values} values of the ranks' program"
        return f"{values}, {f'{len(self.relations.findings)} findings' if self.relations.findings else 'all related'}"

    def diagnostics(self) -> Iterator[Diagnostic]:
        """What is wrong, for people; as warnings what relations could not tell and the numbers have."""
        settled = self.relations.undecided and self.numbers is not None and self.numbers.passed
        for finding in self.relations.findings[:TOLD]:
            told = finding.diagnostic()
            more = (f"{len(self.relations.findings) - TOLD} more findings",) if finding is self._last else ()
            notes = (*told.notes, *more, *self._broken)
            yield replace(told, notes=notes, warns=settled, action=SETTLED if settled else told.action)
        if self.numbers is not None and not self.numbers.passed:
            worst = max(self.numbers.gradients, key=self.numbers.gradients.__getitem__, default="")
            yield Diagnostic(
                "E0701",
                f"the compiled step does not compute what the step for one device computes: {self.numbers.worst:.1e}",
                action="this is a fault of Meshwright; please send the artefact, and use another plan meanwhile",
                notes=(f"the tolerance is {TOLERANCE:.0e}", f"furthest off is the gradient of '{worst}'"),
            )

    @property
    def _last(self) -> object:
        more = len(self.relations.findings) > TOLD
        return self.relations.findings[TOLD - 1] if more else None

    @property
    def _broken(self) -> tuple[str, ...]:
        return (self.broken_by,) if self.broken_by else ()


def verify_equivalence(
    folder: str | Path, numbers: str = "fitting", steps: int = 2, seed: int | None = None
) -> Verdict:
    """Verify the artefact of a folder. ``numbers``: ``none``, ``miniature``, ``full`` (all ranks), or ``fitting``: all
    ranks if they are small, else the miniature."""
    artefact = read_artefact(folder)
    compiled = artefact.rank_program
    relations = check_relations(compiled)
    broken_by = "" if not relations.findings else _broken_by(compiled)
    if numbers == "none":
        return Verdict(relations, broken_by=broken_by)
    if numbers == "full" or (numbers == "fitting" and elements(compiled.program) * compiled.mesh.ranks <= SMALL):
        return Verdict(relations, verify_artefact(folder, steps, seed), broken_by=broken_by)
    seed = artefact.train.seed if seed is None else seed
    found, small = verify_miniature(compiled.program, compiled.plan, steps=steps, seed=seed)
    idle = (f"gradients of {', '.join(found.idle[:4])} were zero, which shows nothing of them",) if found.idle else ()
    return Verdict(relations, found, True, (*small.notes, *idle), broken_by)


def elements(program: StepProgram) -> int:
    """Of all weights of a step."""
    return sum(math.prod(p.spec.shape) for p in program.parameters)


def _broken_by(compiled: Compiled) -> str:
    found = bisect(compiled.program, compiled.plan)
    return str(found) if found is not None else "all passes keep the step: the program was changed after compilation"
