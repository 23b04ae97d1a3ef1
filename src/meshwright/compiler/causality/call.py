"""One op of a run as a rule sees it: arguments by name, their shadows, and what the op returned."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.compiler.causality.shadow import Shadow, constant

if TYPE_CHECKING:
    from meshwright.compiler.causality.interpreter import Interpreter


@dataclass
class Call:
    """``arguments`` are by the names of the op's schema, defaults filled in."""

    interpreter: Interpreter
    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: dict[str, Any]
    out: Any = None
    _shadows: dict[int, Shadow] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @property
    def width(self) -> int:
        return self.interpreter.memory.width

    def shadow(self, value: Any) -> Shadow:
        """The shadow of an argument; a number is a constant."""
        if not isinstance(value, Tensor):
            return constant(())
        found = self._shadows.get(id(value))
        if found is None:
            found = self._shadows[id(value)] = self.interpreter.memory.read(value)
        return found

    def words(self, shadow: Shadow) -> Tensor:
        """The sets of a shadow, empty ones where it has none."""
        if shadow.deps is not None:
            return shadow.deps
        return torch.zeros(self.width, dtype=torch.int64).expand(*shadow.known.shape, self.width)

    def tensors(self) -> list[Tensor]:
        """All tensor arguments in order."""
        return [x for value in self.arguments.values() for x in tensors_in(value)]

    def settled(self, value: Any) -> Shadow:
        """The shadow of an argument in true positions: what is in a listing depends on the whole of it."""
        return self.interpreter.listings.settle(self.shadow(value), value)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [x for one in value for x in tensors_in(one)]
    return []


def bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the schema."""
    names, defaults = _signature(func)
    found = dict(defaults)
    found.update(zip(names, args, strict=False))
    found.update(kwargs)
    return {name: found[name] for name in names if name in found}


@lru_cache(maxsize=4096)
def _signature(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = func._schema.arguments
    names = tuple(a.name for a in arguments)
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in arguments}
    return names, defaults
