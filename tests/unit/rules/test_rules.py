"""Every rule is certified on examples: cut, run the shards, combine, compare with the whole op.

The examples stand in ``examples/``, one file per rule file. ``pytest -rA`` also prints what rules
forbid although it would have worked; :func:`missed_chances` lists it as a table.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.compiler.graph.certify import Findings, certify
from meshwright.compiler.rules import _load
from meshwright.compiler.rules.rule import REGISTRY

torch.manual_seed(0)
FILES = {path.stem: runpy.run_path(str(path)) for path in sorted((Path(__file__).parent / "examples").glob("*.py"))}
EXAMPLES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [e for f in FILES.values() for e in f["EXAMPLES"]]
UNDEFINED: list[str] = [name for f in FILES.values() for name in f.get("UNDEFINED", [])]


def _id(number: int) -> str:
    name = EXAMPLES[number][0]
    return f"{name}-{number - next(i for i, e in enumerate(EXAMPLES) if e[0] == name)}"


@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=_id)
def test_certified(number: int) -> None:
    op, args, kwargs = EXAMPLES[number]
    torch.manual_seed(number)
    found = certify(op, *args, **kwargs)
    for chance in found.chances:
        print(f"missed chance: {chance}")
    assert not found.faults, "\n".join(found.faults)


def test_every_rule_has_an_example() -> None:
    _load()
    names = [e[0] for e in EXAMPLES] + UNDEFINED
    shown = set(names) | {name.rpartition(".")[0] for name in names}
    missing = sorted(set(REGISTRY) - shown)
    assert not missing, "rules without an example in tests/unit/rules/examples: " + ", ".join(missing)


def missed_chances() -> list[tuple[str, str]]:
    """``(op, chance)`` of every example in which a rule forbids something that works."""
    found: list[Findings] = [certify(op, *args, **kwargs) for op, args, kwargs in EXAMPLES]
    return sorted({(f.call.name, chance) for f in found for chance in f.chances})


if __name__ == "__main__":
    for op, chance in missed_chances():
        print(f"{op:45} {chance}")
