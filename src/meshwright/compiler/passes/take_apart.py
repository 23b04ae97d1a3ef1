"""Take the program of a rank that has all blocks apart into passes, to price the pipelines that may be made of it."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.compiler.analysis.lifetimes import roles
from meshwright.compiler.analysis.summarize_stages import Taken, mark
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.passes.compile import compile_step, finished
from meshwright.compiler.passes.known_graphs import KnownGraphs
from meshwright.compiler.passes.meeting_rounds import depths, meet_once, meetings_of
from meshwright.compiler.passes.pieces import split
from meshwright.compiler.passes.stages import Assigned, assign, block_order
from meshwright.compiler.passes.update_stages import assign_update
from meshwright.compiler.plan import Plan
from meshwright.compiler.summary import PASSES


def take_apart(
    tied: StepProgram,
    plan: Plan,
    known: KnownGraphs | None = None,
    *,
    apart: bool = True,
    groups: Iterable[tuple[str, str]] = (),
) -> Taken:
    """The passes of a step in which no two blocks share a weight (see :func:`untie`), under a plan without the axis
    ``pipe``; ``apart``: with gradients of weights in a pass of their own, else all of the backward pass is in ``I``.
    ``groups``: of blocks that repeat, the first copy and the one that stands for all further ones.
    Raises MeshwrightError (E03xx) where the plan cannot be followed."""
    whole = compile_step(tied, plan, verify=False, known=known, raw=True)
    micro, update = meet_once(whole.micro), whole.update
    blocks = block_order(micro.module.graph)
    each = assign(micro.module.graph, roles(micro)[0], blocks[1:])
    together = assign(micro.module.graph, roles(micro)[0], blocks[1:], apart=False)
    homes = {node: stage for node, (stage, _) in each.of.items()}
    mark(blocks, micro.module.graph, homes)
    one = assign(micro.module.graph, roles(micro)[0], (), apart=apart)
    pieces = split(micro, one)
    holders = {p.name: 0 for p in whole.program.parameters}
    holders |= {name: stages[0] for name, stages in each.weights.items() if stages}
    places = assign_update(update.module.graph, roles(update)[0], holders, len(blocks)).of
    mark(blocks, update.module.graph, {node: stage for node, (stage, _) in places.items()})
    mesh = whole.mesh.with_micro(plan.microbatches)
    return Taken(
        whole=whole,
        blocks=blocks,
        homes=homes,
        reading=each.weights,
        passes={p: finished(pieces[0, p].graph, mesh, prefetch=plan.prefetch, meta=True) for p in PASSES},
        origins={p: {name: origin[1] for name, origin in pieces[0, p].origin.items()} for p in PASSES},
        meetings=meetings_of(micro.module.graph, together, groups),
        rounds={node.name: deep for node, deep in depths(micro.module.graph, one).items() if deep},
        update=finished(_copy(update), whole.mesh, on_host=plan.offload, meta=True),
    )


def _copy(local: LocalGraph) -> LocalGraph:
    """The same graph once more: known graphs are shared, and must not be changed."""
    together = Assigned(1, {node: (0, 0) for node in local.module.graph.nodes if node.op == "call_function"})
    return split(local, together, (0,))[0, 0].graph
