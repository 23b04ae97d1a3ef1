"""The update graph: gradient norm, clipping, and the user's own optimizer, traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.diagnostics import MeshwrightError, error
from meshwright.compiler.graph.adapter import compiling, functionalized, trace
from meshwright.compiler.graph.fake import fake_mode, fake_tensor
from meshwright.compiler.graph.program import Graph, Parameter, TensorSpec, Value
from meshwright.frontend.capture import loss_scale
from meshwright.frontend.capture.assemble import finish, lift_constants
from meshwright.frontend.capture.assembly import Assembly, Steps
from meshwright.frontend.capture.contractions import rewrite_contractions
from meshwright.frontend.capture.initial_state import initial_state
from meshwright.frontend.capture.loss_scale import LossScale
from meshwright.frontend.capture.origins import error_origin
from meshwright.frontend.capture.stand_in import cast
from meshwright.frontend.capture.tidy import tidy
from meshwright.frontend.capture.twin import Optimizers, Owner, TensorScalars, optimizer_list, owners, twin

__all__ = ["Optimizers", "Owner", "Update", "capture_update", "owners"]


@dataclass
class Update:
    """The update graph and what it needs from outside."""

    graph: Graph
    state: dict[str, TensorSpec] = field(default_factory=dict)
    state_init: dict[str, float] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)


@dataclass
class _Plan:
    """The optimizers and what each owns, in order."""

    owned: list[tuple[Parameter, Owner]]
    scalars: dict[str, float]
    state: dict[str, TensorSpec] = field(default_factory=dict)
    state_init: dict[str, float] = field(default_factory=dict)


def capture_update(
    trained: list[Parameter],
    optimizer: Optimizers,
    owned: dict[str, Owner],
    clip: float | None,
    scalars: tuple[str, ...],
    reduce: torch.dtype | None,
    constants: dict[str, Tensor],
    scale: LossScale | None = None,
) -> Update:
    """Trace the update of the parameters that have a gradient. Raises E0253 for an optimizer that cannot be traced."""
    plan = _Plan([(p, owned[p.name]) for p in trained if p.name in owned], _scalars(optimizer, scalars))
    try:
        _discover_state(plan)
        return _trace(plan, trained, clip, reduce, constants, scale)
    except MeshwrightError:
        raise
    except Exception as failure:
        names = " and ".join(type(o).__name__ for o in optimizer_list(optimizer))
        reason = str(failure).strip().splitlines()[0][:300] if str(failure).strip() else ""
        data = "DataDependent" in type(failure).__name__ or "data-dependent" in reason
        raise error(
            "E0253",
            f"{names} cannot be traced: "
            + ("it takes a Python number or decision from a tensor" if data else f"{type(failure).__name__}: {reason}"),
            error_origin(failure.__traceback__) if data or error_origin(failure.__traceback__).file else None,
            "use an optimizer whose step is tensor arithmetic alone (AdamW, Adam, SGD, Muon, Adagrad, RMSprop)",
        ) from failure


def _scalars(optimizer: Optimizers, names: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    index = 0
    for one in optimizer_list(optimizer):
        for group in one.param_groups:
            for name in names:
                if isinstance(group.get(name), (int, float, Tensor)) and not isinstance(group[name], bool):
                    found[f"{index}/{name}"] = float(group[name])
            index += 1
    return found


def _run(
    plan: _Plan, parameters: dict[str, Tensor], states: dict[str, Tensor], scalars: dict[str, Tensor]
) -> dict[str, Tensor]:
    """One step of every optimizer on these parameters, whose ``.grad`` is set. Returns the state by name."""
    after: dict[str, Tensor] = {}
    for optimizer in dict.fromkeys(o.optimizer for _, o in plan.owned):
        mine = [(p, o) for p, o in plan.owned if o.optimizer is optimizer]
        groups: dict[int, list[Tensor]] = {}
        numbers: dict[int, int] = {}
        for parameter, owner in mine:
            groups.setdefault(owner.local_group, []).append(parameters[parameter.name])
            numbers[owner.local_group] = owner.group
        one = twin(optimizer, groups, _settings(numbers, scalars))
        for parameter, _ in mine:
            prefix = parameter.name + "/"
            known = {n.removeprefix(prefix): t for n, t in states.items() if n.rpartition("/")[0] == parameter.name}
            if known:
                one.state[parameters[parameter.name]] = known
        with compiling(), TensorScalars():
            one.step()
        for parameter, _ in mine:
            for name, value in one.state[parameters[parameter.name]].items():
                if isinstance(value, Tensor):
                    after[f"{parameter.name}/{name}"] = value
    return after


def _settings(numbers: dict[int, int], scalars: dict[str, Tensor]) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    def settings(local: int, group: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {"capturable": True} if "capturable" in group else {}
        for name, value in scalars.items():
            number, _, entry = name.partition("/")
            if int(number) == numbers[local]:
                made[entry] = value
        return made

    return settings


def _discover_state(plan: _Plan) -> None:
    """The shapes of the state from a step on fakes; the initial values from a tiny real step."""
    if not plan.owned:
        return
    values: dict[tuple[int, int], dict[str, float]] = {}
    by_group: dict[int, list[tuple[Parameter, Owner]]] = {}
    for parameter, owner in plan.owned:
        by_group.setdefault(owner.group, []).append((parameter, owner))
    for group, members in by_group.items():
        owner = members[0][1]
        found = initial_state(owner.optimizer, owner.local_group, [p.spec.shape for p, _ in members])
        values.update({(group, rank): entries for rank, entries in found.items()})
    models = {(owner.group, parameter.spec): (parameter, owner) for parameter, owner in plan.owned}
    fakes = {p.name: _fake(p.spec) for p, _ in models.values()}
    with fake_mode():
        for fake in fakes.values():
            fake.grad = torch.empty_like(fake)
        scalars = {name: torch.empty((), dtype=torch.float64) for name in plan.scalars}
        after = _run(_Plan(list(models.values()), plan.scalars), fakes, {}, scalars)
    for parameter, owner in plan.owned:
        model = models[owner.group, parameter.spec][0].name
        for entry, value in values[owner.group, len(parameter.spec.shape)].items():
            name = f"{parameter.name}/{entry}"
            found_state = after[f"{model}/{entry}"]
            # counters in double precision: 1 - 0.999**step in fp32 is wrong in the fifth digit
            counts = entry == "step" or bool(parameter.spec.shape)  # a moment of a 0-dim parameter is no counter
            scalar = counts and found_state.dim() == 0 and found_state.dtype.is_floating_point
            dtype = torch.float64 if scalar else found_state.dtype
            plan.state[name] = TensorSpec(tuple(found_state.shape), dtype)
            plan.state_init[name] = value


def _trace(
    plan: _Plan,
    trained: list[Parameter],
    clip: float | None,
    reduce: torch.dtype | None,
    constants: dict[str, Tensor],
    scale: LossScale | None,
) -> Update:
    """Norm and clipping of all gradients, then the optimizer's step of each parameter.

    Parameters of one group, shape and dtype are updated by the same operations, so one of them is traced and
    the others are copies; unless the optimizer couples parameters, when all are traced together.
    """
    graph = Assembly()
    parameters = {p.name: graph.place(Value("parameter", p.name), _fake(p.spec)) for p, _ in plan.owned}
    grads = {
        p.name: graph.place(Value("gradient", p.name), fake_tensor(p.spec.shape, cast(p.spec.dtype, reduce)))
        for p in trained
    }
    states = {n: graph.place(Value("state", n), _fake(s)) for n, s in plan.state.items()}
    scalars = {n: graph.place(Value("scalar", n), fake_tensor((), torch.float64)) for n in plan.scalars}
    scaling = loss_scale.place(graph, list(parameters), scale) if scale is not None and parameters else None
    if scaling is not None:
        grads = scaling.unscaled(graph, grads)
    norm, grads = _clip(graph, grads, clip)
    stepped = _step_all(graph, plan, parameters, grads, states, scalars, constants)
    state, first = dict(plan.state), dict(plan.state_init)
    if scaling is not None:
        stepped = scaling.kept(graph, norm, stepped, {**parameters, **states})
        specs, values = loss_scale.state_of(list(parameters), scaling.how)
        state |= specs
        first |= values
    results = {Value("norm", "norm"): norm}
    results.update({Value("parameter", n): stepped[n] for n in parameters})
    results.update({Value("state", n): stepped[n] for n in state})
    module = graph.finish(list(results.values()))
    rewrite_contractions(module)
    tidy(module)
    return Update(finish(module, graph.inputs, list(results)), state, first, plan.scalars)


def _fake(spec: TensorSpec) -> Tensor:
    return fake_tensor(spec.shape, spec.dtype)


def _clip(graph: Assembly, grads: dict[str, fx.Node], clip: float | None) -> tuple[fx.Node, dict[str, fx.Node]]:
    """The global norm, and the gradients scaled down to ``clip`` as ``torch.nn.utils.clip_grad_norm_`` does."""

    def squares(grad: Tensor) -> list[Tensor]:
        wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
        return [torch.ops.meshwright.sum_of_squares(wide)]

    def norm_of(*sums: Tensor) -> list[Tensor]:
        return [torch.ops.meshwright.total(list(sums)).sqrt() if sums else torch.zeros(())]

    sums = [graph.call(squares, grad)[0] for grad in grads.values()]
    (norm,) = graph.call(norm_of, *sums)
    if clip is None:
        return norm, grads
    (scale,) = graph.call(lambda n: [(clip / (n + 1e-6)).clamp(max=1.0)], norm)
    return norm, {n: graph.call(lambda g, s: [g * s.to(g.dtype)], grad, scale)[0] for n, grad in grads.items()}


def _step_all(
    graph: Assembly,
    plan: _Plan,
    parameters: dict[str, fx.Node],
    grads: dict[str, fx.Node],
    states: dict[str, fx.Node],
    scalars: dict[str, fx.Node],
    constants: dict[str, Tensor],
) -> dict[str, fx.Node]:
    """The new parameters and states by name."""
    if not plan.owned:
        return {}
    alike: dict[Any, list[tuple[Parameter, Owner]]] = {}
    for parameter, owner in plan.owned:
        key = (owner.group, parameter.spec, grads[parameter.name].meta["val"].dtype)
        alike.setdefault(key, []).append((parameter, owner))
    # two of each kind, so that an optimizer that couples parameters is seen to do so
    models = [m for members in alike.values() for m in members[:2]]
    traced = _trace_steps(plan, models, grads, constants)
    held = {**parameters, **states}
    if not traced.independent():
        if len(models) < len(plan.owned):
            traced = _trace_steps(plan, plan.owned, grads, constants)
        return graph.inline_all(traced, held, grads, scalars)
    made: dict[str, fx.Node] = {}
    for members in alike.values():
        for parameter, _ in members:
            made.update(graph.inline_one(traced, members[0][0].name, parameter.name, held, grads, scalars))
    return made


def _trace_steps(
    plan: _Plan, members: list[tuple[Parameter, Owner]], grads: dict[str, fx.Node], constants: dict[str, Tensor]
) -> Steps:
    """The traced step of the given parameters."""
    part = _Plan(members, plan.scalars)
    names = [p.name for p, _ in members]
    state_names = [n for n in plan.state if n.rpartition("/")[0] in set(names)]

    def step(
        parameters: list[Tensor], given_grads: list[Tensor], states: list[Tensor], scalars: list[Tensor]
    ) -> list[Tensor]:
        mine = {n: p.clone() for n, p in zip(names, parameters, strict=True)}
        for parameter, grad in zip(mine.values(), given_grads, strict=True):
            parameter.grad = grad.to(parameter.dtype)
        given = {n: s.clone() for n, s in zip(state_names, states, strict=True)}
        after = _run(part, mine, given, dict(zip(plan.scalars, scalars, strict=True)))
        return [*mine.values(), *(after[n] for n in state_names)]

    with torch.no_grad():
        module = trace(
            functionalized(step),
            [_fake(p.spec) for p, _ in members],
            [fake_tensor(p.spec.shape, grads[p.name].meta["val"].dtype) for p, _ in members],
            [_fake(plan.state[n]) for n in state_names],
            [fake_tensor((), torch.float64) for _ in plan.scalars],
        )
    inputs = [Value("parameter", n) for n in names] + [Value("gradient", n) for n in names]
    inputs += [Value("state", n) for n in state_names] + [Value("scalar", n) for n in plan.scalars]
    lift_constants(module, inputs, constants, "update_")
    return Steps(module, inputs, [*names, *state_names])
