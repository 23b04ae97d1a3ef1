"""All findings about half precision in a step: of one device, or as a rank of a plan runs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.numerics.finding import Finding, grouped
from meshwright.compiler.numerics.looked import Gradient, Looked, looked_at
from meshwright.compiler.numerics.of_ranks import findings_of_rank_sums, gradients_of
from meshwright.compiler.numerics.of_state import findings_of_state
from meshwright.compiler.numerics.of_sums import findings_of_local_sums
from meshwright.compiler.numerics.of_totals import findings_of_microbatches
from meshwright.compiler.plan import Plan


def findings(
    program: StepProgram | Compiled, plan: Plan | None = None, *, backend: str | None = None
) -> tuple[Finding, ...]:
    """What half precision costs a step, the gravest first.

    Of a :class:`StepProgram` what one device computes, with ``plan`` also what its microbatches do; of a compiled
    program also the sums over ranks. ``backend``: that whose ops were measured (``cpu``); None: those of any.
    """
    planned = plan is not None or not isinstance(program, StepProgram)
    return grouped(replace(one, planned=planned) for one in _all(program, plan, backend))


def _all(program: StepProgram | Compiled, plan: Plan | None, backend: str | None) -> Iterator[Finding]:
    single = isinstance(program, StepProgram)
    step = program if isinstance(program, StepProgram) else program.program
    plan = plan if isinstance(program, StepProgram) else program.plan
    for looked, mesh in _graphs(program):
        yield from findings_of_local_sums(looked, backend)
        if mesh is not None:
            yield from findings_of_rank_sums(looked, mesh, plan)
        if plan is not None and plan.microbatches > 1:
            yield from findings_of_microbatches(looked, plan, gradients_of(looked, mesh), rounds=not single)
        yield from findings_of_state(looked, step, single)


def _graphs(program: StepProgram | Compiled) -> Iterator[tuple[Looked, Mesh | None]]:
    if isinstance(program, StepProgram):
        micro = looked_at("micro", program.micro)
        made = gradients_of(micro, None)
        yield looked_at("prologue", program.prologue), None
        yield micro, None
        yield looked_at("update", program.update, made), None
        return
    mesh = program.mesh.with_micro(program.plan.microbatches)
    yield looked_at("prologue", program.prologue), mesh
    gradients: dict[str, Gradient] = {}
    for name, graph in _named(program, micro=True):
        looked = looked_at(name, graph)
        gradients |= gradients_of(looked, mesh)
        yield looked, mesh
    for name, graph in _named(program, micro=False):
        yield looked_at(name, graph, gradients), mesh


def _named(program: Compiled, micro: bool) -> Iterator[tuple[str, LocalGraph]]:
    if not isinstance(program, PipelineProgram):
        yield ("micro", program.micro) if micro else ("update", program.update)
        return
    for number, stage in enumerate(program.stages):
        graphs = stage.passes.items() if micro else enumerate(stage.update)
        for kind, graph in graphs:
            yield f"{'pass' if micro else 'update'} {kind} of stage {number}", graph
