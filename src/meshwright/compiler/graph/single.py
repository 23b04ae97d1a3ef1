"""Run a step on one device, as captured: the reference that every mesh is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.compiler.graph.program import Graph, StepProgram, Value
from meshwright.compiler.graph.widen import widen

__all__ = ["StepResult", "initial_state", "run_graph", "run_single", "widen"]


@dataclass
class StepResult:
    """What one step gives. Parameters and state that the step leaves alone are passed on as they were."""

    loss: Tensor
    norm: Tensor
    gradients: dict[str, Tensor]
    """As the micro graph gives them: before clipping."""
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, Tensor]
    prologue: dict[str, Tensor] = field(default_factory=dict)


def initial_state(
    program: StepProgram, device: torch.device | str = "cpu", parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The optimizer state before the first step. ``parameters`` are needed where some of it begins as they are."""
    found = {}
    for name, spec in program.state.items():
        fill = program.state_init.get(name)
        if fill is None:
            owner = (parameters or {})[name.rpartition("/")[0]]
            found[name] = owner.detach().to(device=device, dtype=spec.dtype, copy=True)
        else:
            found[name] = torch.full(spec.shape, fill, dtype=spec.dtype, device=device)
    return found


def run_graph(graph: Graph, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
    """The outputs of one graph. Raises E0259 if an input is missing."""
    missing = [v for v in graph.signature.inputs if v not in values]
    if missing:
        raise error(
            "E0259",
            f"the step needs the {missing[0].kind} '{missing[0].name}', which was not given",
            action=suggestion(missing[0].name, [v.name for v in values if v.kind == missing[0].kind]),
        )
    with torch.no_grad():
        found = graph.module(*(values[v] for v in graph.signature.inputs))
    return dict(zip(graph.signature.outputs, found, strict=True))


def run_single(
    program: StepProgram,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    state: Mapping[str, Tensor] | None,
    batch: Mapping[str, Tensor],
    seed: int = 0,
    step: int = 0,
    scalars: Mapping[str, float] | None = None,
) -> StepResult:
    """One step on the device of the inputs.

    ``parameters`` are by canonical name, ``batch`` by path; ``state`` None is the state before the first step;
    ``scalars`` override the values at capture. Nothing is changed in place.
    """
    device = next(iter(batch.values())).device
    known = initial_state(program, device, parameters) if state is None else dict(state)
    values: dict[Value, Tensor] = {Value("key", "key"): torch.tensor([seed, step], device=device)}
    values.update({Value("parameter", n): t.detach() for n, t in parameters.items()})
    values.update({Value("buffer", n): t for n, t in buffers.items()})
    values.update({Value("batch", n): t for n, t in batch.items()})
    values.update({Value("constant", n): t.to(device) for n, t in program.constants.items()})
    values.update({Value("state", n): t for n, t in known.items()})
    numbers = {**program.scalars, **(scalars or {})}
    values.update({Value("scalar", n): torch.tensor(v, dtype=torch.float64, device=device) for n, v in numbers.items()})
    prologue = run_graph(program.prologue, values)
    values.update(prologue)
    micro = run_graph(program.micro, values)
    values.update({v: t for v, t in micro.items() if v.kind == "gradient"})
    update = run_graph(program.update, values)
    result = StepResult(
        micro[Value("loss", "loss")],
        update[Value("norm", "norm")],
        {v.name: t for v, t in micro.items() if v.kind == "gradient"},
        {n: t.detach() for n, t in parameters.items()},
        dict(buffers),
        known,
        {v.name: t for v, t in prologue.items()},
    )
    result.parameters.update({v.name: t for v, t in update.items() if v.kind == "parameter"})
    result.state.update({v.name: t for v, t in update.items() if v.kind == "state"})
    result.buffers.update({v.name: t for v, t in micro.items() if v.kind == "buffer"})
    return result
