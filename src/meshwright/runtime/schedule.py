"""The numbers that the host gives the optimizer each step, such as learning rates.

The user's own optimizer and scheduler from ``torch.optim`` run on one dummy parameter per group;
what they put into their groups is read before each step. A resumed run replays the schedule to its step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from meshwright.compiler.diagnostics import error

Built = tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]
Build = Callable[[Sequence[nn.Parameter]], Built]
"""Builds the user's optimizer over one parameter per group, in order, and its scheduler, if any."""


class Schedule:
    """Gives the program's scalars (``0/lr``, ``1/betas/0``) for each step.

    Raises MeshwrightError E0630 if the optimizer has not the groups or entries that the program reads, or the scheduler
    depends on more than the number of steps.
    """

    def __init__(self, build: Build, scalars: Iterable[str]) -> None:
        self._names = list(scalars)
        groups = 1 + max((int(name.partition("/")[0]) for name in self._names), default=0)
        self._build = build
        self._groups = groups
        self._step = 0
        self._optimizer, self._scheduler = self._built()
        self._read()

    def at(self, step: int) -> dict[str, float]:
        """The scalars of a step, counted from 0."""
        if step < self._step:
            self._step = 0
            self._optimizer, self._scheduler = self._built()
        if self._scheduler is not None:
            with warnings.catch_warnings():
                # torch warns of schedulers that are stepped beyond their end or out of order
                warnings.simplefilter("ignore")
                for _ in range(step - self._step):
                    self._optimizer.step()
                    self._scheduler.step()
        self._step = step
        return self._read()

    def _built(self) -> Built:
        parameters = [nn.Parameter(torch.zeros(2, 2)) for _ in range(self._groups)]
        optimizer, scheduler = self._build(parameters)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise error(
                "E0630",
                "ReduceLROnPlateau depends on the course of the loss, not on the number of steps alone",
                action="use a schedule that is a function of the step, such as CosineAnnealingLR",
            )
        if len(optimizer.param_groups) < self._groups:
            raise error(
                "E0630",
                f"the optimizer has {len(optimizer.param_groups)} parameter groups, "
                f"the step was compiled for {self._groups}",
                action="build it with one group per parameter that it is given",
            )
        return optimizer, scheduler

    def _read(self) -> dict[str, float]:
        result = {}
        for name in self._names:
            group, *path = name.split("/")
            value: object = self._optimizer.param_groups[int(group)]
            try:
                for key in path:
                    value = value[key] if isinstance(value, dict) else value[int(key)]  # type: ignore[index]  # caught below
                result[name] = float(value)  # type: ignore[arg-type]  # caught below
            except (KeyError, IndexError, TypeError, ValueError) as missing:
                raise error(
                    "E0630",
                    f"the optimizer's group {group} has no number '{'/'.join(path)}', which the step reads",
                    action="give the optimizer that the step was compiled with",
                ) from missing
        return result


def constant(scalars: dict[str, float]) -> Callable[[int], dict[str, float]]:
    """A schedule that never changes."""
    return lambda step: dict(scalars)
