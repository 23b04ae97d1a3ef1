"""Whether what is declared of couplings is said of lines that couple: a misspelt pattern would be no declaration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, nearest
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.declared import meaning_of
from meshwright.compiler.passes.separability.couplings import KINDS, Coupling, couplings
from meshwright.compiler.passes.separability.findings import called
from meshwright.compiler.plan import Declaration

TOLD = 4
"""Lines that couple which are named, at most."""


def check_fits(program: StepProgram, declared: Sequence[Declaration]) -> None:
    """Raises MeshwrightError E0765 for patterns that fit no line that couples samples."""
    found = tuple(without_fit(program, declared))
    if found:
        raise MeshwrightError(*found)


def without_fit(program: StepProgram, declared: Sequence[Declaration]) -> Iterator[Diagnostic]:
    """E0765 for each pattern that fits no line that couples samples. Of whatever no other fits, and of a kind of
    coupling, something may be declared in any case; and of a batch of one sample nothing can be told."""
    named = [entry for entry in declared if entry.pattern != "**" and entry.pattern not in KINDS]
    if not named or program.batch_size < 2:
        return
    found = couplings(program)
    for entry in named:
        if not any(meaning_of([entry], coupling.names) for coupling in found):
            yield _misses(entry, found)


def _misses(entry: Declaration, found: Sequence[Coupling]) -> Diagnostic:
    message = f"'{entry.pattern}', declared {entry.meaning}, is no place where samples of the batch couple"
    if not found:
        return Diagnostic("E0765", message, None, "leave it out: nothing couples them in this step")
    near = nearest_place(entry.pattern, found)
    action = f"did you mean '{near}'?" if near else "name one of these, or the kind of a coupling"
    places = list(dict.fromkeys(_place(coupling) for coupling in found))
    more = f", and {len(places) - TOLD} more" if len(places) > TOLD else ""
    return Diagnostic("E0765", message, None, action, (f"they couple at {'; '.join(places[:TOLD])}{more}",))


def _place(coupling: Coupling) -> str:
    module = f" in module '{coupling.origin.module}'" if coupling.origin.module else ""
    return f"{called(coupling)}{module} ({coupling.kind})"


def nearest_place(pattern: str, found: Iterable[Coupling]) -> str | None:
    """The line of the file that a pattern names which is nearest to its own, else the name that is most like it."""
    found = tuple(found)
    file, colon, line = pattern.rpartition(":")
    if colon and line.isdecimal():
        lines = [c.origin.line for c in found if PurePath(c.origin.file).name == PurePath(file).name]
        if lines:
            return f"{file}:{min(lines, key=lambda at: abs(at - int(line)))}"
    return nearest(pattern, [name for c in found for name in (called(c), c.origin.module, c.kind) if name])
