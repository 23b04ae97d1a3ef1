"""The page "Add an op in ten lines" shows the code that is there, and it is certified."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from meshwright.compiler.graph.certify import certify

ROOT = Path(__file__).parents[3]
RULE = ROOT / "src/meshwright/compiler/rules/gated.py"
EXAMPLE = ROOT / "tests/unit/rules/examples/gated.py"


def test_the_page_shows_what_is_there() -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs/add-an-op.md").read_text(), re.DOTALL)
    assert len(shown) == 2
    assert shown[0] in RULE.read_text()
    assert shown[1] in EXAMPLE.read_text()
    assert len(shown[0].splitlines()) == 10


def test_what_the_page_says_of_it_is_so() -> None:
    found = certify("aten.glu.default", torch.randn(7, 16, dtype=torch.float64), 1)
    assert found.faults == ()
    assert found.rule.operands == ((("d0",), ("half", "d1")),)
    assert found.rule.results == ((("d0",), ("d1",)),)
    assert found.chances == ()
