"""The pages on planning and simulation say what is so: the sentences, options and kinds they list exist."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from meshwright.compiler.search.pin_text import WORDS, parse_pins
from meshwright.compiler.summary import KINDS
from meshwright.compiler.timeline import FUSIONS
from tests.cli.conftest import invoke

ROOT = Path(__file__).parents[2]
PLANNING, SIMULATION, README = (
    (ROOT / page).read_text(encoding="utf-8") for page in ("docs/planning.md", "docs/simulation.md", "README.md")
)
FILES = ("explain.py", "explain_pipelines.py", "sensitivity.py", "why_not.py")
SEARCH = ROOT / "src" / "meshwright" / "compiler" / "search"
SOURCE = "".join((SEARCH / file).read_text(encoding="utf-8") for file in FILES)


def section(page: str, title: str) -> str:
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_beginnings_of_the_sentences_are_those_of_the_planner() -> None:
    rows = re.findall(r"^\| (\*.*?) \|", section(PLANNING, "Reading the reasons"), re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"\*([^*]+)\*", row)]
    assert len(names) >= 12
    for name in names:
        for part in filter(None, (p.strip() for p in name.replace("10 % more", "...").split("..."))):
            assert part in SOURCE, name


def test_the_sentences_that_are_shown_begin_so() -> None:
    """Whatever the figures are by now."""
    for page in (PLANNING, README):
        for line in re.findall(r"^- (\w+ ?\w*)", "".join(re.findall(r"^```text\n(- .*?)```", page, re.M | re.S)), re.M):
            assert line.split()[0] in SOURCE, line


def test_the_options_exist() -> None:
    said = invoke("plan", "--help").output
    for option in set(re.findall(r"`(--[a-z-]+)", PLANNING)):
        assert option in said, option
    said = invoke("simulate", "--help").output
    for option in set(re.findall(r"`(--[a-z-]+)", SIMULATION)):
        assert option in said, option


def test_the_pins_are_words_of_pins() -> None:
    given = re.findall(r"`([^`]+)`", section(PLANNING, "Pins").partition("`--pin`")[2].partition(" A word without")[0])
    assert len(given) >= 10
    for text in given:
        assert parse_pins([text]).words, text
    assert {re.split(r"[ =,]", text)[-1 if text.startswith("no ") else 0] for text in given} <= {*WORDS}


def test_the_benchmarks_that_pages_name_can_be_run() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"-m (benchmarks\.\w+)", page.read_text(encoding="utf-8"))}
    assert len(named) >= 8
    for name in named:
        assert find_spec(name) is not None, name
        assert callable(getattr(import_module(name), "main", None)) or find_spec(f"{name}.__main__"), name


@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_fusion_is_described(fusion: str) -> None:
    assert f"`{fusion}`" in SIMULATION


def test_the_kinds_of_memory_are_shown() -> None:
    table = SIMULATION.partition("Memory of a rank;")[2].partition("```")[0]
    shown = set(re.findall(r"^│ ([a-z ]+?) +│ +[\d.]+ \w+ │ +[\d.]+ \w+ │$", table, re.MULTILINE))
    assert len(shown) > 8 and shown <= {*KINDS}
