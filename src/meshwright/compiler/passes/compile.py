"""The whole way from a step for one device and a plan to the program of a rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx

from meshwright.compiler import collector
from meshwright.compiler.diagnostics import Diagnostic, DiagnosticWarning
from meshwright.compiler.graph.program import Graph, StepProgram, Value, annotation
from meshwright.compiler.graph.rank_program import Layout, LocalGraph, RankProgram
from meshwright.compiler.mesh import Mesh, Sharding
from meshwright.compiler.passes.bucket import bucket
from meshwright.compiler.passes.declared import NOTHING, Meanings
from meshwright.compiler.passes.in_turn import in_turn
from meshwright.compiler.passes.known_graphs import KnownGraphs
from meshwright.compiler.passes.layouts import batch_sharding, check_plan, layouts
from meshwright.compiler.passes.lower import lower
from meshwright.compiler.passes.offload import offload
from meshwright.compiler.passes.overlap import overlap
from meshwright.compiler.passes.placement import Placement
from meshwright.compiler.passes.propagate import propagate
from meshwright.compiler.passes.separability.check import by_line, check_declared
from meshwright.compiler.passes.verify_owed import verify_owed
from meshwright.compiler.passes.verify_shapes import verify_shapes
from meshwright.compiler.passes.widen_reductions import Widening, for_update, widen_reductions, widening_of
from meshwright.compiler.plan import Offload, Plan


@collector.rarely()
def compile_step(
    program: StepProgram,
    plan: Plan,
    *,
    verify: bool = True,
    known: KnownGraphs | None = None,
    raw: bool = False,
) -> RankProgram:
    """Partition the three graphs of a step by a plan.

    Without ``verify`` (to price a candidate) the same program comes out, but its shapes are found on meta tensors and
    owed sums are not derived a second time. With ``known`` graphs that an earlier call has made are not made again:
    such programs share graphs, and must not be changed. ``raw`` graphs are to be cut into stages first: their messages
    are neither joined nor run beside the computation.
    Raises MeshwrightError (E03xx) where the plan cannot be followed.
    """
    check_plan(program, plan)
    check_declared(program, plan)
    layout = layouts(program, plan)
    state = {name: _state_sharding(name, program, layout) for name in program.state}
    known = known or KnownGraphs()
    widening = widening_of(plan)
    local = partial(_local, known, verify, raw=raw)

    prologue = local(program.prologue, plan.mesh, _prologue_placement(program, plan), widening=widening)
    micro = local(
        known.recomputed(program.micro, plan.recompute),
        plan.mesh.with_micro(plan.microbatches),
        _micro_placement(program, plan, layout),
        sequence=frozenset(plan.sequence),
        prefetch=plan.prefetch,
        widening=widening,
        meanings=Meanings(by_line(program, plan.separability), plan.batch),
    )
    if widening is not None:
        widening = for_update(widening, program.micro, micro)
    owed = {v: s for v, s in micro.outputs.items() if v.kind == "gradient"}
    update = local(
        program.update,
        plan.mesh,
        _update_placement(program, layout, state, owed),
        whole_contractions=True,
        prefetch=plan.prefetch,
        on_host=plan.offload,
        widening=widening,
    )
    final = {name: _with_gradient(lies, owed.get(Value("gradient", name))) for name, lies in layout.items()}
    return RankProgram(program, plan, plan.mesh, prologue, micro, update, layouts=final, state=state)


def _local(
    known: KnownGraphs,
    verify: bool,
    graph: Graph,
    mesh: Mesh,
    placement: Placement,
    *,
    sequence: frozenset[str] = frozenset(),
    whole_contractions: bool = False,
    prefetch: int = 0,
    on_host: tuple[Offload, ...] = (),
    widening: Widening | None = None,
    meanings: Meanings = NOTHING,
    raw: bool,
) -> LocalGraph:
    """The graph of a rank."""

    def make() -> LocalGraph:
        placed = propagate(
            graph,
            mesh,
            placement,
            sequence=sequence,
            whole_contractions=whole_contractions,
            warn=_warn,
            meanings=meanings,
        )
        if verify:
            verify_owed(placed, mesh)
        made = verify_shapes(lower(placed, mesh), mesh, meta=not verify)
        if widening is not None:
            made = verify_shapes(widen_reductions(made, mesh, widening), mesh, meta=not verify)
        made = in_turn(made)
        return made if raw else finished(made, mesh, prefetch=prefetch, on_host=on_host, meta=not verify)

    options = (verify, widening, sequence, whole_contractions, prefetch, on_host, meanings, raw)
    return known.local(graph, mesh, placement, options, make)


def finished(
    local: LocalGraph, mesh: Mesh, *, prefetch: int = 0, on_host: tuple[Offload, ...] = (), meta: bool = False
) -> LocalGraph:
    """A lowered graph with its messages joined and run beside the computation, and its state on the host."""
    for _, treat in finishing(mesh, prefetch, on_host):
        local = verify_shapes(treat(local), mesh, meta=meta)
    return local


def finishing(
    mesh: Mesh, prefetch: int = 0, on_host: tuple[Offload, ...] = ()
) -> list[tuple[str, Callable[[LocalGraph], LocalGraph]]]:
    """The passes that finish a lowered graph, by name and in order. Each needs the shapes of what was made before."""
    found: list[tuple[str, Callable[[LocalGraph], LocalGraph]]] = [("bucket", lambda g: bucket(g, mesh))]
    if prefetch:
        found.append(("overlap", lambda g: overlap(g, mesh, prefetch)))
    if on_host:
        found.append(("offload", lambda g: offload(g, on_host)))
    return found


def _prologue_placement(program: StepProgram, plan: Plan) -> Placement:
    inputs = {
        Value("batch", name): batch_sharding(spec.shape, program.batch_dims.get(name), plan, micro=False)
        for name, spec in program.batch.items()
    }
    return Placement(inputs, {})


def _micro_placement(program: StepProgram, plan: Plan, layout: dict[str, Layout]) -> Placement:
    inputs = {
        Value("batch", name): batch_sharding(spec.shape, program.batch_dims.get(name), plan, micro=True)
        for name, spec in program.batch.items()
    }
    storage = {}
    for name, lies in layout.items():
        value = Value("parameter", name)
        inputs[value] = lies.rest
        storage[value] = lies.rest.axes - lies.compute.axes
    outputs = {v: layout[v.name].gradient for v in program.micro.signature.outputs if v.kind == "gradient"}
    wanted = {v: layout[v.name].compute for v in outputs}
    may_owe = frozenset(v for v in program.micro.signature.outputs if v.kind in ("gradient", "loss"))
    pays = dict.fromkeys(_paid_in_micro(program, plan), frozenset(plan.batch))
    outputs |= {v: layout[v.name].state for v in pays}
    return Placement(inputs, outputs, may_owe, storage, wanted, pays=pays)


def _paid_in_micro(program: StepProgram, plan: Plan) -> list[Value]:
    """Gradients that are reduced beside the backward pass: with one microbatch nothing is saved by owing them. Not
    those that the update takes in a wider dtype, in which they are to be added."""
    if not plan.prefetch or plan.microbatches > 1:
        return []
    made, taken = program.micro.outputs(), program.update.placeholders()
    return [v for v in made if v.kind == "gradient" and v in taken and _dtype(made[v]) == _dtype(taken[v])]


def _dtype(node: Any) -> object:
    return annotation(node).dtype if isinstance(node, fx.Node) else None


def _update_placement(
    program: StepProgram, layout: dict[str, Layout], state: dict[str, Sharding], owed: dict[Value, Sharding]
) -> Placement:
    inputs: dict[Value, Sharding] = {}
    early: dict[Value, Sharding] = {}
    for value in program.update.signature.inputs:
        if value.kind == "parameter":
            inputs[value] = layout[value.name].rest
            early[value] = layout[value.name].state
        elif value.kind == "gradient":
            inputs[value] = owed[value].without({"micro"})
            early[value] = layout[value.name].state
        elif value.kind == "state":
            inputs[value] = state[value.name]
    outputs = {}
    for value in program.update.signature.outputs:
        if value.kind == "parameter":
            outputs[value] = layout[value.name].rest
        elif value.kind == "state":
            outputs[value] = state[value.name]
    return Placement(inputs, outputs, early=early)


def _state_sharding(name: str, program: StepProgram, layout: dict[str, Layout]) -> Sharding:
    """State of the parameter's own shape lies as the plan says; counters and factored moments are whole."""
    owner = name.rpartition("/")[0]
    spec = program.state[name]
    if spec.shape == program.parameter(owner).spec.shape:
        return layout[program.parameter(owner).name].state
    return Sharding.whole(spec.shape)


def _with_gradient(layout: Layout, gradient: Sharding | None) -> Layout:
    if gradient is None:
        return layout
    return Layout(layout.rest, layout.compute, gradient.without({"micro"}), layout.state)


def _warn(text: str) -> None:
    warnings.warn(DiagnosticWarning(Diagnostic("W0301", text)), stacklevel=2)
