"""Whether what a plan declares of couplings can be had together."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.declared import meaning_of
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
    """Raises MeshwrightError E0767 for meanings that exclude each other, for groups of unequal size, and where a
    coupling of which nothing is declared would be taken from groups like the others."""
    meanings = sorted({entry.meaning for entry in plan.separability})
    if len(meanings) > 1:
        message = (
            f"the plan declares {' and '.join(f'{m!r}' for m in meanings)}: gradients cannot be told apart by that"
        )
        raise error("E0767", message, action="declare one meaning for all couplings of a step")
    if "per data rank" not in meanings:
        return
    each, ranks = program.batch_size // plan.microbatches, plan.mesh.size(*plan.batch)
    if each % ranks:
        message = f"a microbatch of {each} samples is no equal part for each of {ranks} data ranks"
        raise error("E0767", message, action="choose a batch that divides, or declare it global")
    for coupling in couplings(program):
        if meaning_of(plan.separability, coupling.names) is None:
            message = f"nothing is declared of this coupling ({coupling.kind}), and others are per data rank"
            raise error("E0767", message, coupling.origin, "declare it per data rank too, or all global")
