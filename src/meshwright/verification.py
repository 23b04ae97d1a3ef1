"""Does a compiled step compute what the step for one device computes? Measured in float64, where rounding is 1e-15.

The rank program runs for all ranks in this process on the virtual cluster, the captured step once, both from the
same weights and batches. Gradients, updated weights and the optimizer's state are compared, not the loss alone, which
hides many faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from meshwright.compiler.emit.artefact import read_artefact
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.widen_rank import widen_compiled
from meshwright.job import first_weights, schedule_of
from meshwright.one_device import OneDevice
from meshwright.runtime.data import RandomSource
from meshwright.runtime.materialize import Weights
from meshwright.runtime.virtual import VirtualCluster

TOLERANCE = 1e-9
"""A difference beyond this is a fault; what rounding makes of a correct program is near 1e-15."""


@dataclass(frozen=True)
class Verification:
    """The largest differences over all steps, relative to the largest element of each tensor."""

    steps: int
    ranks: int
    loss: float
    norm: float
    gradients: Mapping[str, float]
    """By parameter."""
    weights: Mapping[str, float]
    state: Mapping[str, float] = field(default_factory=dict)
    """By entry of the optimizer's state, ``<parameter>/<entry>``, and by buffer."""
    idle: tuple[str, ...] = ()
    """Parameters whose gradients were zero in all steps, of which nothing is shown."""

    @property
    def worst(self) -> float:
        return max(self.loss, self.norm, *self.gradients.values(), *self.weights.values(), *self.state.values())

    @property
    def passed(self) -> bool:
        return self.worst <= TOLERANCE and not (self.idle and len(self.idle) == len(self.gradients))


def verify_artefact(folder: str | Path, steps: int = 2, seed: int | None = None) -> Verification:
    """Verify the artefact of a folder on random batches."""
    artefact = read_artefact(folder)
    seed = artefact.train.seed if seed is None else seed
    program = artefact.rank_program.program
    vocabulary = artefact.train.data.vocabulary
    high = {} if vocabulary is None else dict.fromkeys(program.batch, vocabulary)
    source = RandomSource(program, seed=seed, high=high)
    return verify(
        artefact.rank_program,
        first_weights(artefact, seed),
        lambda step: whole_batch_of(source, program, step),
        schedule_of(artefact),
        steps,
        seed,
    )


def verify(
    rank_program: Compiled,
    weights: Weights,
    batches: Callable[[int], Mapping[str, Tensor]],
    scalars: Callable[[int], Mapping[str, float]],
    steps: int = 2,
    seed: int = 0,
) -> Verification:
    """Run both and compare after every step. Two steps, so that what the optimizer remembers of the first counts."""
    wide = widen_compiled(rank_program)
    program = wide.program
    cluster = VirtualCluster(wide, weights, seed=seed, keep_gradients=True)
    reference = OneDevice(wide, weights, cluster.full_parameters(), cluster.full_buffers(), seed)
    loss = norm = 0.0
    gradients: dict[str, float] = {}
    updated: dict[str, float] = {}
    remembered: dict[str, float] = {}
    busy: set[str] = set()
    for step in range(steps):
        batch = {name: t.to(program.batch[name].dtype) for name, t in batches(step).items()}
        values = scalars(step)
        want = reference.step(batch, values)
        got = cluster.step(batch, values)
        loss = max(loss, _relative(got.loss, want.loss))
        norm = max(norm, _relative(got.norm or 0.0, want.norm))
        busy |= {name for name, x in want.gradients.items() if bool((x != 0).any())}
        _keep_largest(gradients, differences(cluster.full_gradients(), want.gradients))
        _keep_largest(updated, differences(cluster.full_parameters(), want.parameters))
        _keep_largest(remembered, differences(cluster.full_buffers(), want.buffers))
        for entry in dict.fromkeys(name.rpartition("/")[2] for name in want.state):
            # entries are of other magnitudes: a counter, a mean of gradients, a mean of squares
            own = {name: x for name, x in want.state.items() if name.endswith(f"/{entry}")}
            _keep_largest(remembered, differences(cluster.full_state(), own))
    idle = tuple(name for name in gradients if name not in busy)
    return Verification(steps, rank_program.mesh.ranks, loss, norm, gradients, updated, remembered, idle)


def differences(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """By tensor: the largest difference of an element, as a share of the tensor's largest element.

    A tensor that is nothing but rounding (the gradient of a bias that cancels out) is measured against a thousandth
    of the largest element of all. What is missing, of another shape or not a number is infinitely far.
    """
    floor = 1e-3 * max((float(x.abs().max()) for x in want.values() if x.numel()), default=0.0)
    found = {}
    for name, x in want.items():
        mine = got.get(name)
        if mine is None or mine.shape != x.shape:
            found[name] = float("inf")
            continue
        far = float((mine.double() - x.double()).abs().max()) if x.numel() else 0.0
        size = max(float(x.abs().max()) if x.numel() else 0.0, floor)
        found[name] = (far / size if size else far) if far == far else float("inf")
    return found


def whole_batch_of(source: RandomSource, program: StepProgram, step: int) -> dict[str, Tensor]:
    """All rows of the global batch of a step."""
    read = source.rows(step)
    return {name: read(name, list(range(program.batch_size))) for name in program.batch}


def _relative(got: float, want: float) -> float:
    far = abs(got - want) / max(abs(want), 1e-300) if got != want else 0.0
    return far if far == far else float("inf")


def _keep_largest(kept: dict[str, float], found: Mapping[str, float]) -> None:
    for name, value in found.items():
        kept[name] = max(kept.get(name, 0.0), value)
