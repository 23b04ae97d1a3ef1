"""The rules by the names of ops: each file of ``ops/`` brings its own with a decorator."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.compiler.causality.call import Call

Rule = Callable[["Call"], Any]
"""From a call that has been computed to the Shadow of its result, or a tuple of them."""

_RULES: dict[str, Rule] = {}
_REPLACEMENTS: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of ops: ``aten.cumsum`` for all overloads, ``aten.max.dim`` for one."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in _RULES, f"{name} has two rules"
            _RULES[name] = function
        return function

    return register


def replacement(*names: str) -> Callable[[Rule], Rule]:
    """Register a function that computes the op itself otherwise, with its shadow; NotImplemented says as usual."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in _REPLACEMENTS, f"{name} is replaced twice"
            _REPLACEMENTS[name] = function
        return function

    return register


def find_rule(name: str) -> Rule | None:
    """The rule of ``aten.max.dim``: that of the overload, else that of the op."""
    _load()
    return _RULES.get(name) or _RULES.get(name.rpartition(".")[0])


def find_replacement(name: str) -> Rule | None:
    """The function that stands in for an op."""
    _load()
    return _REPLACEMENTS.get(name) or _REPLACEMENTS.get(name.rpartition(".")[0])


@cache
def _load() -> None:
    package = importlib.import_module("meshwright.compiler.causality.ops")
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{found.name}")
