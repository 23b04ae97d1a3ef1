"""The whole way from a step for one device and a plan to the program of a rank."""

from __future__ import annotations

import warnings

from meshwright.compiler.diagnostics import Diagnostic
from meshwright.compiler.graph.program import Graph, StepProgram, Value
from meshwright.compiler.graph.rank_program import Layout, LocalGraph, RankProgram
from meshwright.compiler.mesh import Mesh, Sharding
from meshwright.compiler.passes.bucket import bucket
from meshwright.compiler.passes.layouts import batch_sharding, check_plan, layouts
from meshwright.compiler.passes.lower import lower
from meshwright.compiler.passes.placement import Placement
from meshwright.compiler.passes.propagate import propagate
from meshwright.compiler.passes.verify_owed import verify_owed
from meshwright.compiler.passes.verify_shapes import verify_shapes
from meshwright.compiler.plan import Plan


def compile_step(program: StepProgram, plan: Plan) -> RankProgram:
    """Partition the three graphs of a step by a plan.

    Raises MeshwrightError (E03xx) where the plan cannot be followed.
    """
    check_plan(program, plan)
    layout = layouts(program, plan)
    state = {name: _state_sharding(name, program, layout) for name in program.state}
    with_micro = plan.mesh.with_micro(plan.microbatches)
    sequence = frozenset(plan.sequence)

    prologue = propagate(program.prologue, plan.mesh, _prologue_placement(program, plan), warn=_warn)
    micro = propagate(program.micro, with_micro, _micro_placement(program, plan, layout), sequence=sequence, warn=_warn)
    owed = {v: s for v, s in _output_shardings(micro).items() if v.kind == "gradient"}
    update = propagate(
        program.update, plan.mesh, _update_placement(program, layout, state, owed), whole_contractions=True, warn=_warn
    )
    lowered = _lowered(prologue, plan.mesh), _lowered(micro, with_micro), _lowered(update, plan.mesh)
    final = {name: _with_gradient(lies, owed.get(Value("gradient", name))) for name, lies in layout.items()}
    return RankProgram(program, plan, plan.mesh, *lowered, layouts=final, state=state)


def _lowered(graph: Graph, mesh: Mesh) -> LocalGraph:
    verify_owed(graph, mesh)
    local = verify_shapes(lower(graph, mesh), mesh)
    return verify_shapes(bucket(local, mesh), mesh)


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
    return Placement(inputs, outputs, may_owe, storage, wanted)


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


def _output_shardings(graph: Graph) -> dict[Value, Sharding]:
    from meshwright.compiler.graph.program import annotation

    found = {v: annotation(n).sharding for v, n in graph.outputs().items()}
    return {v: s for v, s in found.items() if s is not None}


def _warn(text: str) -> None:
    warnings.warn(Diagnostic("W0301", text).render(), stacklevel=2)
