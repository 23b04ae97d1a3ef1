"""A loss or gradient norm that is not finite is told, with step and rank, never trained on silently."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Literal

import torch

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError
from meshwright.compiler.plan import PIPE

if TYPE_CHECKING:
    from meshwright.runtime.step_executor import Local, RankCommunicator

OnNonFinite = Literal["stop", "warn"]
"""``stop``: E0605 before the update. ``warn``: W0605 from the first rank, and the step goes on."""

_ACTION = "lower the learning rate, clip gradients or compute in a wider dtype; resume from the last checkpoint"


def check_loss(
    loss: float,
    own: Local | None,
    communicator: RankCommunicator,
    step: int,
    mode: OnNonFinite,
    device: torch.device | str = "cpu",
) -> None:
    """Report a loss that is not finite, naming the ranks whose ``own`` part of it (None: they have none) is not.

    All ranks that add up the same loss see the same value, so they all come here and may communicate.
    """
    if math.isfinite(loss):
        return
    mesh = communicator.mesh
    devices = type(mesh)(mesh.axes[1:])
    parts = tuple(a for a in mesh.names if own is not None and a in own.sharding.owed)
    shared = tuple(a for a in (PIPE,) if a in mesh.names)
    bad = torch.zeros(devices.ranks, device=device)
    bad[communicator.rank] = own is not None and not math.isfinite(float(own.value))
    for axes in filter(None, (parts, shared)):
        bad = communicator.all_reduce(bad, axes, "max")
    guilty = bad.nonzero().flatten().tolist()
    named = guilty and (parts or shared)
    whose = f"the part of rank{'s' * (len(guilty) > 1)} {', '.join(map(str, guilty))}" if named else "the sum"
    _report(f"the loss is {loss} at step {step}: {whose} is not finite", mode, communicator.rank)


def check_norm(norm: float | None, step: int, mode: OnNonFinite, rank: int) -> None:
    """Report a gradient norm that is not finite; the parameters have then been updated with it."""
    if norm is not None and not math.isfinite(norm):
        _report(f"the gradient norm is {norm} at step {step}, and parameters were updated with it", mode, rank)


def _report(message: str, mode: OnNonFinite, rank: int) -> None:
    if mode == "stop":
        raise MeshwrightError(Diagnostic("E0605", message, action=_ACTION))
    if rank == 0:
        warnings.warn(Diagnostic("W0605", message, action=_ACTION).render(), stacklevel=3)
