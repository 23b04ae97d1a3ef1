"""The parameter groups of the user's optimizers: learning rates are read from them, other settings must stay.

They are watched, not held: a script that keeps neither its model nor its optimizer gives their memory back, and the
step goes on with the rates that it saw last.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.adapter import mark_stepped
from meshwright.compiler.graph.program import StepProgram


class ParameterGroups:
    """Of all optimizers of a step, numbered in their order."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], program: StepProgram) -> None:
        self._owners = [(weakref.ref(owner), len(owner.param_groups)) for owner in optimizers]
        self._scalars = {name: float(value) for name, value in program.scalars.items()}
        self._settings = self._read()

    def scalars(self) -> dict[str, float]:
        """What is fed to each step by name (``{"0/lr": 1e-3}``), as the groups have it now.

        Raises MeshwrightError E0650 for a change that the compiled step would not follow.
        """
        now = self._read()
        gone = {number for number, owner, _ in self._groups() if owner is None}
        for name in [*self._settings, *now]:
            number, _, entry = name.partition("/")
            if int(number) in gone:
                continue
            if name not in now or name not in self._settings or now[name] != self._settings[name]:
                raise error(
                    "E0650",
                    f"'{entry}' of the optimizer's parameter group {number} was changed after the step was compiled",
                    None,
                    "leave it alone (of a scheduler: cycle_momentum=False), or save, make a new step, and load",
                )
        groups = {number: group for number, owner, group in self._groups() if owner is not None}
        for name in self._scalars:
            number, _, entry = name.partition("/")
            if int(number) in groups:
                self._scalars[name] = float(groups[int(number)][entry])
        return dict(self._scalars)

    def mark_stepped(self) -> None:
        """Tell torch's schedulers that the optimizers have made their step."""
        for owner, _ in self._owners:
            if (optimizer := owner()) is not None:
                mark_stepped(optimizer)

    def _groups(self) -> Iterator[tuple[int, torch.optim.Optimizer | None, dict[str, Any]]]:
        """The number of each group, its optimizer (None: it is gone), and what is in it now."""
        number = 0
        for owner, count in self._owners:
            optimizer = owner()
            groups = optimizer.param_groups if optimizer is not None else [{}] * count
            for group in groups:
                yield number, optimizer, group
                number += 1

    def _read(self) -> dict[str, object]:
        """What the compiled update has as constants: the entries that are not fed at each step."""
        return {
            name: value
            for number, owner, group in self._groups()
            for entry, value in group.items()
            # what schedulers and the user note down in a group is not read by the optimizer
            if owner is not None and entry in owner.defaults and (name := f"{number}/{entry}") not in self._scalars
        }
