"""The registry of lowerings, and what one may ask about the place where it is applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.graph.adapter import OpOverload


@dataclass(frozen=True)
class Folded:
    """What a mask that depends on positions alone turned out to be."""

    causal: bool = False
    window: int = 0
    constant: str = ""
    """The name under which the mask is a constant of the program; empty: no mask is needed."""


@dataclass
class Site:
    """One application of a lowering."""

    node: fx.Node
    origin: Origin
    key: Tensor
    """The random key of the step."""
    next_site: Callable[[], int]
    """A new number for each place that draws random numbers."""
    folded: Mapping[fx.Node, Folded]
    """Masks evaluated at compile time."""
    constants: Mapping[str, Tensor]
    values: Mapping[fx.Node, Any]
    """The values of the exported graph's nodes so far."""


Lowering = Callable[..., Any]
LOWERINGS: dict[OpOverload | str, Lowering] = {}
"""By op; those of other packages, which may not be there, by name."""


def lowering_of(target: Any) -> Lowering | None:
    """The function that replaces an op, if there is one."""
    return LOWERINGS.get(target) or LOWERINGS.get(str(target))


def lowers(*targets: Any) -> Callable[[Lowering], Lowering]:
    """Register the function that replaces the ops; it is called as ``function(site, *args, **kwargs)``."""

    def register(function: Lowering) -> Lowering:
        for target in targets:
            if target in LOWERINGS:
                raise ValueError(f"{target} has two lowerings")
            LOWERINGS[target] = function
        return function

    return register
