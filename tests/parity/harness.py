"""One cell of the parity table: a model under a plan on the virtual cluster, against one device, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache

import torch
from torch import Tensor, nn

from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.widen import widen
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.models import MODELS, Example, Variant
from tests.reference import Step, reference_steps

STEPS = 2
"""Two, so that what the optimizer remembers of the first matters in the second."""

SEED = 5
RATE = 1e-2


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Muon on the matrices, which is all it takes; the other parameters stay as they are."""
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=RATE)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"AdamW": adamw, "SGD": sgd, "Muon": muon}


@dataclass(frozen=True)
class Task:
    """What is trained: the part of a cell that capture sees."""

    model: str
    variant: Variant = field(default_factory=Variant)
    optimizer: str = "AdamW"
    clip: float | None = 0.5

    def __str__(self) -> str:
        said = [self.model, self.optimizer]
        said += [{True: "tied", False: "untied"}[self.variant.tied]] if self.variant.tied is not None else []
        said += [f"dropout {self.variant.dropout}"] if self.variant.dropout else []
        return ", ".join(said + ([f"clip {self.clip}"] if self.clip else []))


@dataclass(frozen=True)
class Cell:
    """A task under a plan, which is given as the text of a preset, with the number of ranks and microbatches."""

    task: Task
    plan: str
    ranks: int
    microbatches: int = 1

    def __str__(self) -> str:
        return f"{self.task} | {self.plan} on {self.ranks} x {self.microbatches}"


@dataclass(frozen=True)
class Difference:
    """The largest differences over all steps and parameters; see :func:`far`."""

    loss: float
    norm: float
    gradients: float
    weights: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.norm, self.gradients, self.weights)

    @staticmethod
    def worst_of(steps: Sequence[Difference]) -> Difference:
        """The largest of each kind."""
        return Difference(*(max(getattr(d, f.name) for d in steps) for f in fields(Difference)))


@cache
def examples(task: Task) -> tuple[Example, ...]:
    return tuple(MODELS[task.model](task.variant, seed) for seed in range(STEPS))


@cache
def truth(task: Task) -> list[Step]:
    first, *_ = made = examples(task)
    return reference_steps(first.model, [e.batch for e in made], OPTIMIZERS[task.optimizer], task.clip, seed=SEED)


@cache
def captured(task: Task) -> StepProgram:
    first = examples(task)[0]
    program = capture(first.model, first.batch, optimizer=OPTIMIZERS[task.optimizer](first.model), clip=task.clip)
    return widen(program)


def compiled(cell: Cell) -> Compiled:
    """What the ranks of the cell run."""
    program = captured(cell.task)
    return compile_plan(program, replace(preset(cell.plan, program, cell.ranks), microbatches=cell.microbatches))


def measure(cell: Cell) -> Difference:
    """Run the cell and say how far it is from one device."""
    weights = from_module(copy.deepcopy(examples(cell.task)[0].model).double())
    cluster = VirtualCluster(compiled(cell), weights, seed=SEED, keep_gradients=True)
    differences = []
    for example, step in zip(examples(cell.task), truth(cell.task), strict=True):
        got = cluster.step(example.batch)
        differences.append(compare(cluster, got.loss, got.norm, step))
    return Difference.worst_of(differences)


def compare(cluster: VirtualCluster, loss: float, norm: float | None, step: Step) -> Difference:
    """How far a step is from the same on one device: loss and norm, and the gradients and weights of a cluster."""
    program = cluster.rank_program.program
    assert norm is not None
    return Difference(
        loss=abs(loss - step.loss) / abs(step.loss),
        norm=abs(norm - step.norm) / step.norm,
        gradients=far(cluster.full_gradients(), canonical(program, step.gradients)),
        weights=far(cluster.full_parameters(), canonical(program, step.weights)),
    )


def canonical(program: StepProgram, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same by the names that the program has for its parameters (of a tied one, any may be the first)."""
    return {program.parameter(name).name: x for name, x in tensors.items()}


def far(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """The largest difference of any element, as a share of the largest element of its tensor.

    A tensor that is nothing but rounding (the gradient of a key's bias is zero by the mathematics of softmax) is
    measured against a thousandth of the largest element of all. NaN and missing tensors count as infinitely far.
    """
    if set(got) != set(want):
        return float("inf")
    floor = 1e-3 * max(float(x.abs().max()) for x in want.values())
    worst = 0.0
    for name, x in want.items():
        difference = float((got[name].double() - x).abs().max()) if got[name].shape == x.shape else float("inf")
        worst = max(worst, difference / max(float(x.abs().max()), floor))
        if difference != difference:
            return float("inf")
    return worst
