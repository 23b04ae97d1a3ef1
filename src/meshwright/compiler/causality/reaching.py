"""The modules that a function computes with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn


def modules_in(value: Any, depth: int, seen: set[int]) -> Iterator[nn.Module]:
    """Modules that a function can reach: what it closes over, is bound to, or names."""
    if depth > 3 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield value
        return
    inner: list[Any] = []
    if isinstance(value, partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        inner = [value.__self__, value.__func__]
    elif inspect.isfunction(value):
        found = inspect.getclosurevars(value) if depth == 0 else None
        inner = [*found.nonlocals.values(), *found.globals.values()] if found else []
        if depth:
            inner = [c.cell_contents for c in value.__closure__ or () if _filled(c)]
    elif isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif hasattr(value, "__dict__") and not inspect.isclass(value) and not inspect.ismodule(value):
        inner = list(vars(value).values())
    for one in inner:
        yield from modules_in(one, depth + 1, seen)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
