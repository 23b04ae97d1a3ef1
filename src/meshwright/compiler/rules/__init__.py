"""Op rules, one file per op family. :func:`rule_of` finds the rule of a call.

Files are found by listing this folder: to add an op, add a ``@rule`` function to the family's
file, or a new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Hashable
from functools import cache

from meshwright.compiler.rules.rule import REGISTRY, OpCall, Rule

_KNOWN: dict[Hashable, Rule] = {}
"""Repeated blocks, and the plans of a search, ask the same again and again."""
_MOST = 100_000


@cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def has_rule(name: str, pointwise: bool = False) -> bool:
    """Whether there is a rule for the op of that name; ``pointwise``: ATen tags it so."""
    _load()
    return pointwise or name in REGISTRY or name.rpartition(".")[0] in REGISTRY


def rule_of(call: OpCall) -> Rule | None:
    """The rule of the op, or None when it has none (it then runs with whole operands).

    An op that ATen tags as pointwise needs no rule of its own.
    """
    _load()
    namespace, op, _ = call.name.split(".", 2)
    function = REGISTRY.get(call.name) or REGISTRY.get(f"{namespace}.{op}")
    if function is None and call.pointwise and call.operands:
        from meshwright.compiler.rules.pointwise import pointwise

        function = pointwise
    if function is None:
        return None
    key = (function, call.key)
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        found = _KNOWN[key] = function(call)
    return found
