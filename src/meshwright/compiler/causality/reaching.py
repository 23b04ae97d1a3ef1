"""The modules that a function computes with, and the whole numbers that their code names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType
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


_MOST_NUMBERS = 6


def numbers_named(function: Any, modules: list[nn.Module]) -> list[int]:
    """Whole numbers that stand in the user's own code: what it reads off tensors may be compared with them."""
    found: dict[int, None] = {}
    for module in modules:
        for one in module.modules():
            if not type(one).__module__.startswith(("torch.", "transformers.")):
                for name, method in vars(type(one)).items():
                    if name != "__init__":
                        _numbers_in(getattr(method, "__code__", None), found)
    _numbers_in(getattr(function, "__code__", None), found)
    return [n for n in found if abs(n) > 3][:_MOST_NUMBERS]


def _numbers_in(code: Any, found: dict[int, None]) -> None:
    for one in code.co_consts if isinstance(code, CodeType) else ():
        if isinstance(one, CodeType):
            _numbers_in(one, found)
        elif isinstance(one, int) and not isinstance(one, bool):
            found[one] = None
        elif isinstance(one, str) and one.isdecimal() and len(one) < 10:
            found[int(one)] = None
        elif isinstance(one, tuple | frozenset):
            found.update({n: None for n in one if isinstance(n, int) and not isinstance(n, bool)})


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
