"""Whether what a plan declares of couplings can be had together."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.separability.couplings import KINDS, couplings
from meshwright.compiler.plan import Declaration, Plan


def by_line(program: StepProgram, declared: Sequence[Declaration]) -> tuple[Declaration, ...]:
    """The declarations with lines of the program in place of kinds of couplings."""
    if not any(entry.pattern in KINDS for entry in declared):
        return tuple(declared)
    found = couplings(program)
    made: list[Declaration] = []
    for entry in declared:
        places = [f"{c.origin.file}:{c.origin.line}" for c in found if c.kind == entry.pattern]
        made += [Declaration(p, entry.meaning) for p in places] if entry.pattern in KINDS else [entry]
    return tuple(made)


def check_declared(program: StepProgram, plan: Plan) -> None:
    """Raises MeshwrightError E0767 for groups of two sizes, and for groups that are not of equal size."""
    weaker = {entry.meaning: entry.pattern for entry in plan.separability if entry.meaning != "global"}
    ranks = plan.mesh.size(*plan.batch)
    if len(weaker) > 1 and ranks > 1:
        said = " and ".join(f"{_called(pattern)} {meaning}" for meaning, pattern in weaker.items())
        action = f"declare {_called(weaker['per microbatch'])} per data rank too, or one of them global"
        raise error("E0767", f"the plan declares {said}: groups of two sizes in one step", action=action)
    if "per data rank" not in weaker:
        return
    each = program.batch_size // plan.microbatches
    if each % ranks:
        message = f"a microbatch of {each} samples is no equal part for each of {ranks} data ranks"
        raise error("E0767", message, action="choose a batch that divides, or declare it global")


def _called(pattern: str) -> str:
    return "all else" if pattern == "**" else f"'{pattern}'"
