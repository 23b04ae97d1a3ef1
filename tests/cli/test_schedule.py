"""``meshwright schedule``: drawings, pictures, the comparison, and the page's example."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshwright.compiler.schedules.table import parse_rows
from tests.cli.conftest import invoke

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_the_page_shows_what_the_command_prints() -> None:
    command, shown = re.findall(r"```console\n\$ meshwright (.*?)\n```\n\n```text\n(.*?)```", PAGE.read_text(), re.S)[0]
    assert invoke(*command.split()).output == shown


def test_the_table_that_is_told_is_the_schedule() -> None:
    told = json.loads(invoke("schedule", "zb-v", "--stages", 4, "--microbatches", 5, "--json").output)
    rows = parse_rows("\n".join(told["rows"]))
    assert told["ranks"] == len(rows) == 2 and told["schedule"] == "zb-v"
    assert sum(len(step) for row in rows for step in row) == 4 * 5 * 3


def test_a_picture_has_every_action(tmp_path: Path) -> None:
    result = invoke("schedule", "dualpipe", "--stages", 4, "--microbatches", 8, "-o", tmp_path / "new" / "picture.svg")
    assert result.exit_code == 0 and "written to" in result.output
    picture = ElementTree.parse(tmp_path / "new" / "picture.svg").getroot()
    titles = [t.text or "" for t in picture.iter("{http://www.w3.org/2000/svg}title")]
    passes = sum(1 if re.match(r"\d+[FIW]", t) else 2 for t in titles if re.match(r"\d+[FBIW]\d+:", t))
    assert passes == 4 * 8 * 3, "a whole backward pass counts for its two parts"


def test_the_winner_among_which_list_chose_is_told() -> None:
    asked = ("--stages", 8, "--virtual", 2, "--microbatches", 8)
    told = json.loads(invoke("schedule", "list", *asked, "--json").output)
    same = json.loads(invoke("schedule", told["table"], "--stages", 8, "--json").output)
    assert told["schedule"] == "list" and told["table"] == "zb-v" and told["rows"] == same["rows"]
    assert "list, here the same as zb-v: " in invoke("schedule", "list", *asked).output
    assert "list: zb-v" in invoke("schedule", "--stages", 4).output
    slow = ("--stages", 4, "--send", 0.3, "--forward", 1.7, "--memory", 5)
    own = invoke("schedule", "LIST", *slow)
    assert "\nlist, a table of its own: " in own.output


def test_stages_are_those_of_all_ranks() -> None:
    for virtual, ranks in ((2, 4), (4, 2)):
        told = invoke("schedule", "interleaved", "--stages", 8, "--virtual", virtual, "--json").output
        assert json.loads(told)["ranks"] == ranks


def test_schedules_are_compared_on_as_many_ranks() -> None:
    rows = json.loads(invoke("schedule", "--stages", 4, "--microbatches", 8, "--json").output)
    found = {row["schedule"]: row for row in rows}
    assert {row["ranks"] for row in rows} == {4}
    assert found["interleaved"]["step"] < found["1f1b"]["step"] == found["gpipe"]["step"] == pytest.approx(33)
    assert found["1f1b"]["held"] == 4 and found["zb-v"]["held"] == 4 and found["gpipe"]["held"] == 8
    assert "dualpipe" not in {r["schedule"] for r in json.loads(invoke("schedule", "--stages", 3, "--json").output)}
    assert "most held" in invoke("schedule").output
