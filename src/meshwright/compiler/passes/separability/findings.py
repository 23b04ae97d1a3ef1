"""What couples the samples of a step, told: as findings of a check, and as the reason why a batch is not cut."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.compiler.diagnostics import Diagnostic
from meshwright.compiler.graph.program import StepProgram, Value
from meshwright.compiler.passes.declared import meaning_of
from meshwright.compiler.passes.separability.couplings import Coupling, Kind, couplings
from meshwright.compiler.plan import Declaration

CODES: dict[Kind, str] = {
    "batch statistic": "E0760",
    "balance loss": "E0761",
    "contrastive loss": "E0762",
    "counted over the batch": "E0763",
    "function of the batch": "E0764",
}
_WHAT: dict[Kind, str] = {
    "batch statistic": "a statistic over the samples of the batch is used on each of them",
    "balance loss": "the loss has a product of means over the batch",
    "contrastive loss": "samples of the batch are compared with each other",
    "counted over the batch": "what becomes of a sample depends on its place among those of the batch",
    "function of the batch": "something that is no sum over samples is made of all of them",
}


def findings(program: StepProgram, declared: Sequence[Declaration] = ()) -> tuple[Diagnostic, ...]:
    """A finding for each line of the user's that couples samples and whose meaning is not ``declared`` (E0760 to
    E0764): over data ranks it means the whole batch, into microbatches it cannot be cut. None: the step may be cut over
    its batch in any way."""
    return tuple(_finding(coupling) for coupling in undeclared(program, declared))


def undeclared(program: StepProgram, declared: Sequence[Declaration]) -> tuple[Coupling, ...]:
    """The couplings that no declaration fits."""
    return tuple(c for c in couplings(program) if meaning_of(declared, c.names) is None)


def _finding(coupling: Coupling) -> Diagnostic:
    feeds = " and ".join(filter(None, [_loss(coupling.feeds), _buffers(coupling.feeds)]))
    return Diagnostic(
        CODES[coupling.kind],
        f"{_WHAT[coupling.kind]} ({coupling.kind})",
        coupling.origin,
        f'declare what it means in microbatches: separability={{"{called(coupling)}": "global"}}',
        (f"samples couple first at {coupling.node} ({coupling.op})", *([f"it goes into {feeds}"] if feeds else [])),
    )


def called(coupling: Coupling) -> str:
    """The name by which a declaration would best call a coupling: its line, or its module, or its kind."""
    lines = [name for name in coupling.names if name.endswith(f":{coupling.origin.line}")]
    return lines[-1] if lines else coupling.origin.module or coupling.kind


def _loss(feeds: Sequence[Value]) -> str:
    return "the loss" if any(v.kind == "loss" for v in feeds) else ""


def _buffers(feeds: Sequence[Value]) -> str:
    names = [f"'{v.name}'" for v in feeds if v.kind == "buffer"]
    if not names:
        return ""
    return f"the buffers {', '.join(names)}" if len(names) > 1 else f"the buffer {names[0]}"
