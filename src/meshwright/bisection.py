"""Which pass is it that makes a program compute something else? The passes are run one by one, and after each it is
checked whether the step is still the step for one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.compiler.equivalence.check import check_relations
from meshwright.compiler.equivalence.findings import OUTPUT, UNDECIDED, Finding
from meshwright.compiler.equivalence.single import Meaning, first_difference, meaning_of
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.compile import compile_step, finishing
from meshwright.compiler.passes.master_weights import as_policy
from meshwright.compiler.passes.pipeline import compile_pipeline
from meshwright.compiler.passes.recompute import recompute
from meshwright.compiler.passes.untie import original, untie
from meshwright.compiler.passes.verify_shapes import verify_shapes
from meshwright.compiler.plan import PIPE, Plan
from meshwright.miniature import as_it_is, run_miniature


@dataclass(frozen=True)
class Bisected:
    """The first pass behind which a program is not equivalent any more, and what is found there. ``name`` is
    ``"program"`` where all passes keep the step, and only the program given is another one."""

    name: str
    finding: Finding

    def __str__(self) -> str:
        where = f"at '{self.finding.node}' of {self.finding.graph}" if self.finding.node else f"in {self.finding.graph}"
        return f"the pass '{self.name}' makes it another step, {where}: {self.finding.message}"


def bisect(
    program: StepProgram, plan: Plan, compiled: Compiled | None = None, *, numbers: bool = False
) -> Bisected | None:
    """The first pass that makes of a step another one under a plan; None if none does.

    ``compiled``: what came out, to be checked at last. ``numbers``: where relations find nothing or cannot tell, run
    the ranks; for small steps.
    """
    program = as_policy(program, plan.numerics)
    meaning = meaning_of(program)
    for name, finding in _after_each(program, plan, meaning, numbers):
        if finding is not None:
            return Bisected(name, finding)
    if compiled is not None and (finding := _finding(compiled, meaning, numbers)) is not None:
        return Bisected("program", finding)
    return None


def _after_each(
    program: StepProgram, plan: Plan, meaning: Meaning, numbers: bool
) -> Iterator[tuple[str, Finding | None]]:
    """The passes in order, with what is found behind each."""
    again = replace(program, micro=recompute(program.micro, plan.recompute))
    yield "recompute", _changed(meaning, again, {}, "micro")
    mesh, tied, copies, inner = plan.mesh, program, dict[str, str](), plan
    if plan.pipeline is not None:
        tied = untie(program, plan.pipeline.first_blocks)
        copies = {p.name: original(p.name) for p in tied.parameters if original(p.name) != p.name}
        yield "untie", _changed(meaning, tied, copies, "micro")
        mesh = Mesh(tuple(axis for axis in plan.mesh.axes if axis[0] != PIPE))
        inner = replace(plan, mesh=mesh, pipeline=None)
    whole = compile_step(tied, inner, raw=True)
    own = meaning if tied is program else meaning_of(tied)
    yield "lower", _finding(whole, own, numbers)
    if plan.pipeline is None:
        yield from _finished(whole, plan, meaning, numbers)
    else:
        yield "stages", _finding(compile_pipeline(program, plan, verify=False), meaning, numbers)


def _finished(whole: RankProgram, plan: Plan, meaning: Meaning, numbers: bool) -> Iterator[tuple[str, Finding | None]]:
    micro = plan.mesh.with_micro(plan.microbatches)
    graphs = (
        (whole.prologue, plan.mesh, finishing(plan.mesh)),
        (whole.micro, micro, finishing(micro, plan.prefetch)),
        (whole.update, plan.mesh, finishing(plan.mesh, plan.prefetch, plan.offload)),
    )
    for name in ("bucket", "overlap", "offload"):
        treated = False
        for local, mesh, passes in graphs:
            for own, treat in passes:
                if own == name:
                    verify_shapes(treat(local), mesh)
                    treated = True
        if treated:
            yield name, _finding(whole, meaning, numbers)


def _changed(meaning: Meaning, program: StepProgram, copies: dict[str, str], graph: str) -> Finding | None:
    """Whether a step with the same inputs gives the same results."""
    found = first_difference(meaning, program, copies)
    if found is None:
        return None
    value, node, is_, was = found
    message = f"the {value.kind} '{value.name}' is another value than before"
    return Finding(OUTPUT, graph, node, message, is_, was)


def _finding(compiled: Compiled, meaning: Meaning, numbers: bool) -> Finding | None:
    """The first thing that is wrong with a program. What relations cannot tell, numbers do."""
    found = check_relations(compiled, meaning).findings
    wrong = next((f for f in found if f.code != UNDECIDED), None)
    if wrong is not None or not numbers:
        return wrong or next(iter(found), None)
    verified = run_miniature(as_it_is(compiled.program, compiled.plan), compiled)
    if verified.passed:
        return None
    if found:
        return found[0]
    worst = max(verified.gradients, key=lambda n: verified.gradients[n], default="")
    message = f"the numbers differ by {verified.worst:.1e}, most in the gradient of '{worst}'"
    return Finding(OUTPUT, "the ranks' program", "", message)
