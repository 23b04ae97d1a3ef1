"""What training draws by chance, on average: noise that is not rescaled makes another value than evaluation uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from meshwright.compiler.causality.clock import TimeIsUp
from meshwright.compiler.drift.aligning import Block, Pair
from meshwright.compiler.drift.arguments import listed
from meshwright.compiler.drift.step import Key, Step, Trace

DRAWS = 64
"""Runs of training over which is averaged."""
FEWEST = 16
"""If there is no time for all of them."""
SURE = 6.0
"""Standard errors from which an average is taken to be another one."""
LEAST = 1e-3
"""Relative difference of averages below which nothing is told."""


@dataclass(frozen=True)
class Noise:
    """Ops of training that draw, what they are given that is not drawn, and the op of evaluation that makes it."""

    block: Block
    given: Step
    result: Step
    evaluation: Key


@dataclass(frozen=True)
class Average:
    """What training makes of a value on average: ``scale`` times it, and ``shift``."""

    scale: float
    shift: float
    draws: int

    def of(self, value: Tensor) -> Tensor:
        """The value that evaluation would need to use for the average of training."""
        return value * self.scale + self.shift

    @property
    def told(self) -> str:
        """In words."""
        scale = f"{self.scale:.3g} times what evaluation uses" if self.scale != 1 else "what evaluation uses"
        shift = f" and {self.shift:+.3g}" if self.shift else ""
        return f"on average over {self.draws} runs {scale}{shift}"


def noise_of(block: Block, training: Trace, aligned: list[Pair | Block], drawn: set[int]) -> Noise | None:
    """None where the ops take no value, or several, of the size that they make, which evaluation has as well."""
    result = next((s for s in reversed(block.first) if s.dtype), None)
    if result is None:
        return None
    own = {s.number for s in block.first} | drawn
    shape = result.results[0].shape
    given = {
        _uncast(training, n)
        for s in block.first
        for n in s.sources - own
        if any(o.shape == shape and o.floating and o.ordered for o in s.operands)
    }
    size = math.prod(shape)
    fitting = [n for n in given if sum(math.prod(r.shape) for r in training.steps[n].results[:1]) == size]
    twins = {p.first.number: p.second for p in aligned if isinstance(p, Pair)}
    if len(fitting) != 1 or fitting[0] not in twins or not training.steps[fitting[0]].active:
        return None
    return Noise(block, training.steps[fitting[0]], result, twins[fitting[0]].key)


def averages(noises: list[Noise], run: Callable[[int], dict[Key, Step]]) -> dict[int, Average]:
    """By number of the noise those whose average is another value. ``run`` gives the steps of training in float64 for
    a seed. Raises what it raises."""
    lines: list[list[tuple[float, float]]] = [[] for _ in noises]
    size = [0.0] * len(noises)
    for seed in range(1, DRAWS + 1):
        try:
            steps = run(seed)
        except TimeIsUp:
            if seed <= FEWEST:
                raise
            break
        for number, noise in enumerate(noises):
            given, made = (steps.get(s.key) for s in (noise.given, noise.result))
            line = _line(given.value, made.value) if given is not None and made is not None else None
            if line is not None and given is not None and given.value is not None:
                lines[number].append(line)
                size[number] = max(size[number], float(given.value.square().mean().sqrt()))
    found = {}
    for number, drawn in enumerate(lines):
        if len(drawn) >= FEWEST:
            scale = _sure([a for a, _ in drawn], 1.0, LEAST)
            shift = _sure([b for _, b in drawn], 0.0, LEAST * size[number])
            if scale != 1 or shift:
                found[number] = Average(scale, shift, len(drawn))
    return found


def told_of(noise: Noise) -> tuple[str, str]:
    """Both sides."""
    return listed(noise.block.first), listed(noise.block.second)


def _line(given: Tensor | None, made: Tensor | None) -> tuple[float, float] | None:
    """The straight line that fits best, ``made = a * given + b``; None where it fits badly: it is another value."""
    if given is None or made is None or given.numel() != made.numel() or given.numel() < 2:
        return None
    x, y = given.double().flatten(), made.double().flatten()
    if not bool((torch.isfinite(x) & torch.isfinite(y)).all()):
        return None
    dx, dy = x - x.mean(), y - y.mean()
    spread = float(dx.square().sum())
    if not spread:
        return None
    slope = float((dx * dy).sum()) / spread
    return slope, float(y.mean()) - slope * float(x.mean())


def _sure(values: list[float], expected: float, least: float) -> float:
    """The mean, if it is surely another one than expected; else that."""
    mean = fmean(values)
    bound = max(least, SURE * stdev(values) / math.sqrt(len(values)))
    return mean if abs(mean - expected) > bound else expected


def _uncast(trace: Trace, number: int) -> int:
    step = trace.steps[number]
    while step.cast and len(step.sources) == 1:
        step = trace.steps[next(iter(step.sources))]
    return step.number
