"""The pages at the top and in docs say what is so: their examples work and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright
from meshwright.compiler.graph.certify import certify_rule
from meshwright.compiler.plan_file import read_plan
from meshwright.compiler.rules.dims import named
from meshwright.compiler.rules.rule import OpCall, Rule

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_paths_in_the_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    roots = [ROOT, ROOT / "src" / "meshwright", ROOT / "src" / "meshwright" / "compiler"]
    for path in re.findall(r"`((?:[\w.]+/)+[\w.]*|[a-z_]+\.py)`", text):
        if path.startswith("build/"):
            continue  # of an artefact
        places = [*roots, ROOT / "src" / "meshwright" / "frontend" / "language"]
        assert any((place / path).exists() for place in places), path


def test_the_first_file_of_the_readme_computes(tmp_path: Path) -> None:
    (text,) = blocks("README.md", "mw")
    (tmp_path / "small.mw").write_text(text, encoding="utf-8")
    loaded = meshwright.load(str(tmp_path / "small.mw"))
    assert torch.isfinite(loaded.loss_module()(**loaded.example_batch()))


def test_the_plan_of_the_page_can_be_read() -> None:
    (text,) = blocks("docs/plans.md", "toml")
    assert str(read_plan(text).mesh) == "pipe=2, data=2, tensor=2"


def test_the_rule_in_contributing_is_certified() -> None:
    source, example = blocks("CONTRIBUTING.md", "python")
    rules: list[Any] = []
    known = {"rule": lambda name: rules.append, "OpCall": OpCall, "Rule": Rule, "named": named}
    exec(source, known)
    known["x"] = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    exec(example, known)
    ((op, args, kwargs),) = known["EXAMPLES"]  # type: ignore[misc]  # made by the line above
    shape = certify_rule(op, args, kwargs, None).call
    found = certify_rule(op, args, kwargs, rules[0](shape))
    assert not found.faults
    assert not found.chances
