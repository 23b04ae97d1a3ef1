"""Meshwright compiles a training step written for one device into the programs that a cluster runs.

Names are imported when they are first used, so that ``import meshwright`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {
    "check": "meshwright.checking",
    "drift": "meshwright.compiler.drift.judge",
    "load": "meshwright.frontend.language",
    "capture": "meshwright.frontend.capture",
    "compile": "meshwright.build",
    "plan": "meshwright.planning",
    "simulate": "meshwright.simulation",
    "parallelize": "meshwright.api",
    "transform": "meshwright.transformation",
    "Plan": "meshwright.compiler.plan",
    "MeshwrightError": "meshwright.compiler.diagnostics",
}
"""Where each public name is defined."""

__all__ = [
    "MeshwrightError",
    "Plan",
    "__version__",
    "capture",
    "check",
    "compile",
    "drift",
    "load",
    "parallelize",
    "plan",
    "simulate",
    "transform",
]

if TYPE_CHECKING:
    from meshwright.compiler.diagnostics import MeshwrightError
    from meshwright.compiler.plan import Plan


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    found = getattr(importlib.import_module(place), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
