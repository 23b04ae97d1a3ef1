"""Loss scaling for computation in fp16: gradients begin at a scale, and a step that overflows is left out.

The scale is state of the optimizer, kept beside every parameter so that each stage of a pipeline has its own; all are
equal. The flag is the global gradient norm, which is not finite where any gradient on any rank is not. Semantics and
defaults of ``torch.amp.GradScaler``: the loss that is told is not scaled, gradients are unscaled before their norm, and
a step that is left out counts in no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.fake import fake_tensor
from meshwright.compiler.graph.program import TensorSpec, Value
from meshwright.compiler.plan import Precision
from meshwright.frontend.capture.assembly import Assembly

SCALE, GOOD = "loss_scale", "steps_of_loss_scale"
"""The entries of a parameter's state: the scale, and how many steps went well since it last changed."""


@dataclass(frozen=True)
class LossScale:
    """How the scale moves: times ``backoff`` after an overflow, times ``growth`` after ``interval`` good steps."""

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


def scale_for(precision: Precision | None, wanted: LossScale | None) -> LossScale | None:
    """The scaling of a step: what is ``wanted``, else the default one where a precision computes in fp16."""
    return wanted or (LossScale() if precision is not None and precision.compute == "fp16" else None)


@dataclass(frozen=True)
class Scaling:
    """Loss scaling in an update graph: the scale and the number of good steps by parameter."""

    how: LossScale
    scales: Mapping[str, fx.Node]
    good: Mapping[str, fx.Node]

    def unscaled(self, graph: Assembly, grads: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
        """The gradients divided by the scale, in fp32. One that no optimizer owns takes the scale of another."""
        any_scale = next(iter(self.scales.values()))
        return {name: graph.call(_divided, grad, self.scales.get(name, any_scale))[0] for name, grad in grads.items()}

    def kept(
        self, graph: Assembly, norm: fx.Node, stepped: Mapping[str, fx.Node], before: Mapping[str, fx.Node]
    ) -> dict[str, fx.Node]:
        """The parameters and states after the step, or before it where the norm is not finite; and the scales."""
        (finite,) = graph.call(_is_finite, norm)
        made = {name: graph.call(_chosen, finite, after, before[name])[0] for name, after in stepped.items()}
        move = _moving(self.how)
        for name, scale in self.scales.items():
            made[f"{name}/{SCALE}"], made[f"{name}/{GOOD}"] = graph.call(move, finite, scale, self.good[name])
        return made


def state_of(names: list[str], how: LossScale) -> tuple[dict[str, TensorSpec], dict[str, float]]:
    """The entries of state that scaling needs, and their first values."""
    spec = TensorSpec((), torch.float32)
    specs = {f"{name}/{entry}": spec for name in names for entry in (SCALE, GOOD)}
    return specs, {name: how.initial if name.endswith(f"/{SCALE}") else 0.0 for name in specs}


def place(graph: Assembly, names: list[str], how: LossScale) -> Scaling:
    """The inputs of an update graph for the parameters of these names."""

    def entry(name: str) -> fx.Node:
        return graph.place(Value("state", name), fake_tensor((), torch.float32))

    scales = {name: entry(f"{name}/{SCALE}") for name in names}
    return Scaling(how, scales, {name: entry(f"{name}/{GOOD}") for name in names})


def last_read(module: fx.GraphModule, parameters: list[str], owned: set[str]) -> str:
    """Of the parameters, which are the first inputs of a graph, the owned one that is first read the latest: the stage
    of a pipeline that makes the loss has it."""
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    places = dict(zip(parameters, module.graph.find_nodes(op="placeholder"), strict=False))
    first = {name: min((order[u] for u in node.users if not _copies(u)), default=-1) for name, node in places.items()}
    for name, node in places.items():
        casts = [r for u in node.users if _copies(u) for r in u.users]
        first[name] = min([order[r] for r in casts] + ([first[name]] if first[name] >= 0 else []), default=-1)
    return max((name for name in parameters if name in owned), key=lambda name: first[name])


def _copies(node: fx.Node) -> bool:
    return node.target is torch.ops.aten._to_copy.default


def _divided(grad: Tensor, scale: Tensor) -> list[Tensor]:
    # the reciprocal in double precision, as GradScaler takes it
    return [grad.to(torch.promote_types(grad.dtype, torch.float32)) * scale.double().reciprocal().float()]


def _is_finite(norm: Tensor) -> list[Tensor]:
    return [torch.isfinite(norm)]


def _chosen(finite: Tensor, after: Tensor, before: Tensor) -> list[Tensor]:
    return [torch.where(finite, after, before)]


def _moving(how: LossScale) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    def move(finite: Tensor, scale: Tensor, good: Tensor) -> list[Tensor]:
        counted = good + 1
        grows = counted >= how.interval
        grown = torch.where(grows, scale * how.growth, scale)
        start = torch.zeros_like(good)
        return [
            torch.where(finite, grown, scale * how.backoff),
            torch.where(finite, torch.where(grows, start, counted), start),
        ]

    return move
