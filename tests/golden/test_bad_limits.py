"""Limits that no plan can keep to: the message of each, to the letter. ``pytest --update-golden`` writes anew.

Every heading of the page is a case; the line below it says the model, the cluster and what is asked for.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.compiler.cluster.presets import preset
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.infeasible import infeasible
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.search import search
from tests.unit.search.doubles import Textbook, transformer

PAGE = Path(__file__).parent / "errors" / "limits.md"
CASE = re.compile(r"^## ([^\n]+)\n\n`([^\n]+)`\n\n```text\n(.*?)```\n", re.MULTILINE | re.DOTALL)
CASES = {name: (line, shown) for name, line, shown in CASE.findall(PAGE.read_text(encoding="utf-8"))}


def model(name: str, batch: int) -> ProgramFacts:
    if name == "13b":
        return transformer(13, 40, 5120, 40, batch=batch, inner=13824)
    if name == "8b":
        return transformer(8, 32, 4096, 32, groups=8, inner=14336, batch=batch)
    if name == "70b":
        return transformer(70, 80, 8192, 64, groups=8, inner=28672, batch=batch)
    if name == "plain":  # nothing to cut and no blocks
        return replace(transformer(1, 1, 1024, 1, batch=batch), cuts={}, heads=0, blocks={}, state=0)
    raise ValueError(name)


def told(line: str) -> str:
    """What is printed for ``13b batch=64 h100x8 ranks=6 reserve=8 --pin tp=3``."""
    words = shlex.split(line)
    pins = [words[i + 1] for i, word in enumerate(words) if word == "--pin"]
    settings = dict(w.split("=") for i, w in enumerate(words[2:], 2) if "=" in w and words[i - 1] != "--pin")
    on = preset(words[1])
    assert on is not None
    facts = model(words[0], int(settings.get("batch", 64)))
    try:
        limits = Limits(int(settings.get("reserve", 0)) << 30, parse_pins(pins))
        found = search(facts, on, int(settings.get("ranks", on.ranks)), limits, Textbook(facts, on))
        if found.best is None:
            raise infeasible(found)
    except MeshwrightError as fault:
        return str(fault) + "\n"
    raise AssertionError(f"{line} is no fault: {found.best.candidate}")


@pytest.mark.parametrize("name", CASES)
def test_bad_limits_are_told(name: str, update_golden: bool) -> None:
    line, shown = CASES[name]
    got = told(line)
    assert re.match(r"error\[E04\d\d\]: ", got)
    assert re.search(r"^  = help: \S", got, re.MULTILINE), "every fault says what to do"
    if update_golden:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(
            text.replace(f"`{line}`\n\n```text\n{shown}```", f"`{line}`\n\n```text\n{got}```"), encoding="utf-8"
        )
    else:
        assert got == shown


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 30
