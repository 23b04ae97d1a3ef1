"""What the field cases share: train on one device and on virtual ranks, in float64, and compare everything.

The side of one device is eager PyTorch and nothing else, but for dropout, whose mask is a choice.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Plan
from meshwright.frontend.capture import capture
from meshwright.runtime.layout import Coordinates
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.parity.harness import far
from tests.reference import CountedDropout, Widened, clipped

Batch = Mapping[str, Tensor]
Loss = Callable[[Any, Any], Tensor]
OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """A model in float64 with its weights, a global batch for each step, and how it is trained."""

    model: nn.Module
    batches: Sequence[Batch]
    optimizer: OptimizerFactory = sgd
    loss: Loss | None = None
    clip: float | None = None
    seed: int = 0

    @cached_property
    def program(self) -> StepProgram:
        """Captured once."""
        return capture(self.model, dict(self.batches[0]), self.optimizer(self.model), self.loss, self.clip)


@dataclass(frozen=True)
class Trained:
    """What each step gave. Gradients are those before clipping; a tied parameter goes by its first name."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: list[dict[str, Tensor]]
    buffers: list[dict[str, Tensor]]

    def far_from(self, other: Trained) -> float:
        """The largest difference of any step, as a share of the size of what differs."""
        numbers = [(a, b) for mine, theirs in ((self.losses, other.losses), (self.norms, other.norms))
                   for a, b in zip(mine, theirs, strict=True)]  # fmt: skip
        found = [abs(a - b) / max(abs(b), 1e-3) for a, b in numbers]
        for mine, theirs in ((self.gradients, other.gradients), (self.weights, other.weights)):
            found += [far(a, b) for a, b in zip(mine, theirs, strict=True)]
        found += [far(a, b) for a, b in zip(self.buffers, other.buffers, strict=True) if b]
        return max(found) if all(x == x for x in found) else float("inf")


def eager(case: Case) -> Trained:
    """The truth: plain PyTorch on one device."""
    model = copy.deepcopy(case.model)
    optimizer = case.optimizer(model)
    made = Trained([], [], [], [], [])
    for number, batch in enumerate(case.batches):
        model.zero_grad()
        with Widened():
            with CountedDropout(torch.tensor([case.seed, number])):
                accepted = inspect.signature(model.forward).parameters
                output = model(**{n: x for n, x in batch.items() if n in accepted})
                value = output if case.loss is None else case.loss(output, batch)
            value.backward()
            made.losses.append(value.item())
            made.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            made.norms.append(clipped(model.parameters(), case.clip))
            optimizer.step()
        made.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
        made.buffers.append({n: b.clone() for n, b in model.named_buffers()})
    return made


def captured(case: Case) -> StepProgram:
    return case.program


def cluster_of(case: Case, plan: str | Plan, ranks: int = 4, microbatches: int = 1) -> VirtualCluster:
    """The case on virtual ranks, before its first step."""
    program = captured(case)
    if isinstance(plan, str):
        plan = replace(preset(plan, program, ranks), microbatches=microbatches)
    return VirtualCluster(compile_plan(program, plan), from_module(case.model), seed=case.seed, keep_gradients=True)


def train(cluster: VirtualCluster, case: Case) -> Trained:
    """All steps of the case on a cluster."""
    made = Trained([], [], [], [], [])
    for batch in case.batches:
        result = cluster.step(batch)
        assert result.norm is not None
        made.losses.append(result.loss)
        made.norms.append(result.norm)
        made.gradients.append(cluster.full_gradients())
        made.weights.append(cluster.full_parameters())
        made.buffers.append(cluster.full_buffers())
    return made


def difference(case: Case, plan: str | Plan, ranks: int = 4, microbatches: int = 1) -> float:
    """How far the case on virtual ranks is from one device; see :meth:`Trained.far_from`."""
    return train(cluster_of(case, plan, ranks, microbatches), case).far_from(eager(case))


def copies_agree(cluster: VirtualCluster) -> int:
    """Check that ranks that hold the same part of a parameter hold the same bits; returns how many pairs there were."""
    mesh, pairs = cluster.mesh, 0
    for name, layout in cluster.rank_program.layouts.items():
        first: dict[tuple[tuple[int, int], ...], Tensor] = {}
        for rank, holdings in enumerate(cluster.holdings):
            where: Coordinates = mesh.coordinates(rank)
            part = tuple(s.bounds(mesh, where) for _, _, s in layout.rest.segments())
            if name not in holdings.parameters:  # it belongs to stages of other ranks
                continue
            mine = holdings.parameters[name]
            if part in first:
                pairs += 1
                assert torch.equal(mine, first[part]), f"rank {rank} holds another copy of {name}"
            first.setdefault(part, mine)
    return pairs
