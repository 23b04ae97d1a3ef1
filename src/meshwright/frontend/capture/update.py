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
from meshwright.compiler.graph.program import Annotation, Graph, Parameter, TensorSpec, Value
from meshwright.frontend.capture.assemble import finish, lift_constants
from meshwright.frontend.capture.contractions import rewrite_contractions
from meshwright.frontend.capture.initial_state import initial_state
from meshwright.frontend.capture.origins import error_origin
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
) -> Update:
    """Trace the update of the parameters that have a gradient. Raises E0213 for an optimizer that cannot be traced."""
    plan = _Plan([(p, owned[p.name]) for p in trained if p.name in owned], _scalars(optimizer, scalars))
    try:
        _discover_state(plan)
        return _trace(plan, trained, clip, reduce, constants)
    except MeshwrightError:
        raise
    except Exception as failure:
        names = " and ".join(type(o).__name__ for o in optimizer_list(optimizer))
        reason = str(failure).strip().splitlines()[0][:300] if str(failure).strip() else ""
        data = "DataDependent" in type(failure).__name__ or "data-dependent" in reason
        raise error(
            "E0213",
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


def _run(plan: _Plan, parameters: dict[str, Tensor], states: dict[str, Tensor], scalars: dict[str, Tensor]) -> dict[str, Tensor]:
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
    fakes = {p.name: fake_tensor(p.spec.shape, p.spec.dtype) for p, _ in plan.owned}
    with fake_mode():
        for fake in fakes.values():
            fake.grad = torch.empty_like(fake)
        scalars = {name: torch.empty((), dtype=torch.float64) for name in plan.scalars}
        after = _run(plan, fakes, {}, scalars)
    for parameter, owner in plan.owned:
        for entry, value in values[owner.group, len(parameter.spec.shape)].items():
            name = f"{parameter.name}/{entry}"
            found_state = after[name]
            # counters in double precision: 1 - 0.999**step in fp32 is wrong in the fifth digit
            scalar = found_state.dim() == 0 and found_state.dtype.is_floating_point
            dtype = torch.float64 if scalar else found_state.dtype
            plan.state[name] = TensorSpec(tuple(found_state.shape), dtype)
            plan.state_init[name] = value


def _trace(
    plan: _Plan, trained: list[Parameter], clip: float | None, reduce: torch.dtype | None, constants: dict[str, Tensor]
) -> Update:
    names = [p.name for p, _ in plan.owned]
    state_names, scalar_names = list(plan.state), list(plan.scalars)

    def step(
        parameters: list[Tensor], grads: list[Tensor], states: list[Tensor], scalars: list[Tensor]
    ) -> list[Tensor]:
        norm, grads = _clipped(grads, clip)
        by_name = {p.name: g for p, g in zip(trained, grads, strict=True)}
        mine = {n: p.clone() for n, p in zip(names, parameters, strict=True)}
        for name, parameter in mine.items():
            parameter.grad = by_name[name].to(parameter.dtype)
        given = {n: s.clone() for n, s in zip(state_names, states, strict=True)}
        after = _run(plan, mine, given, dict(zip(scalar_names, scalars, strict=True)))
        return [norm, *mine.values(), *(after[n] for n in state_names)]

    with torch.no_grad():
        module = trace(
            functionalized(step),
            [fake_tensor(p.spec.shape, p.spec.dtype) for p, _ in plan.owned],
            [fake_tensor(p.spec.shape, reduce or p.spec.dtype) for p in trained],
            [fake_tensor(s.shape, s.dtype) for s in plan.state.values()],
            [fake_tensor((), torch.float64) for _ in scalar_names],
        )
    inputs = [Value("parameter", n) for n in names]
    inputs += [Value("gradient", p.name) for p in trained]
    inputs += [Value("state", n) for n in state_names] + [Value("scalar", n) for n in scalar_names]
    outputs = [Value("norm", "norm"), *(Value("parameter", n) for n in names)]
    outputs += [Value("state", n) for n in state_names]
    lift_constants(module, inputs, constants, "update_")
    _annotate(module)
    rewrite_contractions(module)
    tidy(module)
    return Update(finish(module, inputs, outputs), plan.state, plan.state_init, plan.scalars)


def _clipped(grads: list[Tensor], clip: float | None) -> tuple[Tensor, list[Tensor]]:
    """The global norm, and the gradients scaled down to ``clip`` as ``torch.nn.utils.clip_grad_norm_`` does."""
    wide = [g.float() if g.dtype in (torch.float16, torch.bfloat16) else g for g in grads]
    if not wide:
        return torch.zeros(()), grads
    norm = torch.ops.meshwright.total([(g * g).sum() for g in wide]).sqrt()
    if clip is None:
        return norm, grads
    scale = (clip / (norm + 1e-6)).clamp(max=1.0)
    return norm, [g * scale.to(g.dtype) for g in grads]


def _annotate(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        value = node.meta.get("val")
        note = Annotation(phase="update")
        if isinstance(value, Tensor):
            note.shape, note.dtype = tuple(value.shape), value.dtype
        node.meta = {"val": value, "meshwright": note}
