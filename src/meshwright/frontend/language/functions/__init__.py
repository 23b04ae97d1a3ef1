"""The built-in functions, one file per family. A new one is one decorated function in a file of this folder."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from meshwright.frontend.language.functions.invocation import Builtin


@cache
def builtins() -> dict[str, Builtin]:
    """Every built-in by name."""
    found: dict[str, Builtin] = {}
    for module in iter_modules(__path__):
        for value in vars(import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, Builtin):
                found[value.name] = value
    return found
