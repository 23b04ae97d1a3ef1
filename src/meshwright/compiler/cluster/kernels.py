"""How long one kernel takes on a device."""

from __future__ import annotations

from meshwright.compiler.cluster.device import Device
from meshwright.compiler.summary import Kernel


def kernel_seconds(device: Device, kernel: Kernel) -> float:
    """The longer of computing and moving bytes, at the rates that the device reaches for these sizes; no launch."""
    raise NotImplementedError
