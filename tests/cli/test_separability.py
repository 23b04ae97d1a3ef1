"""``--separability``: of the commands that compile, plan and check; and what a factory declares itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.checking_answers import equivalence
from meshwright.checking_source import read_given
from meshwright.compiler.causality.clock import Clock
from meshwright.compiler.plan import Declaration
from meshwright.compiler.plan_file import read_plan
from tests.cli.conftest import SMALL, invoke

STEPS = """
import torch
from torch import nn

class Aux(nn.Module):
    def forward(self, x):
        return (x.softmax(-1).mean(0) ** 2).sum()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.aux = nn.Linear(4, 4), Aux()

    def forward(self, x):
        y = self.first(x)
        return y.square().mean() + self.aux(y)

def coupled(**more):
    model = Model()
    return {"model": model, "batch": {"x": torch.randn(8, 4)},
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **more}

def declared():
    return coupled(separability={"aux": "per microbatch"})

def wrong():
    return coupled(separability=3)
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "coupled_steps.py").write_text(STEPS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def compiled(source: str, *options: str) -> tuple[int, str]:
    result = invoke("compile", f"coupled_steps:{source}", "--plan", "ddp=2,micro=2", "-o", "out", *options)
    return result.exit_code, result.output


def test_compile(steps: Path) -> None:
    code, said = compiled("coupled")
    assert code == 1 and "E0305" in said
    assert compiled("coupled", "--separability", "aux=global")[0] == 0
    assert read_plan((steps / "out" / "plan.toml").read_text()).separability == (Declaration("aux", "global"),)
    assert invoke("verify", "out", "--steps", 1).exit_code == 0
    code, said = compiled("coupled", "--separability", "aux=globally")
    assert code == 1 and "E0765" in said and "did you mean 'global'?" in said
    code, said = compiled("coupled", "--separability", "first=global")
    assert code == 1 and "error[E0765]: 'first', declared global, is no place where samples" in said
    assert "in module 'aux'" in said


def test_a_factory_declares_and_the_command_counts_more(steps: Path) -> None:
    assert compiled("declared")[0] == 0
    assert read_plan((steps / "out" / "plan.toml").read_text()).separability == (Declaration("aux", "per microbatch"),)
    assert compiled("declared", "--separability", "global")[0] == 0
    assert read_plan((steps / "out" / "plan.toml").read_text()).separability == (Declaration("**", "global"),)
    code, said = compiled("wrong")
    assert code == 1 and "E0112" in said and "separability" not in said.split("it is of type")[1]


def test_plan_and_simulate(steps: Path) -> None:
    options = ("--separability", "aux=global")
    result = invoke(
        "plan", "coupled_steps:coupled", "--cluster", "a100x2", "--pin", "micro=2", "-o", "p.toml", *options
    )
    assert result.exit_code == 0, result.output
    assert read_plan((steps / "p.toml").read_text()).separability == (Declaration("aux", "global"),)
    given = ("simulate", "coupled_steps:coupled", "--plan", "ddp=2,micro=2", "--cluster", "a100x2")
    assert invoke(*given).exit_code == 1
    assert invoke(*given, *options).exit_code == 0


def test_check_finds_what_is_not_declared(steps: Path) -> None:
    def found(source: str, *options: str) -> int:
        invoke("check", f"coupled_steps:{source}", "--json", "found.json", *options)
        return len(json.loads((steps / "found.json").read_text())["separability"]["findings"])

    assert found("coupled") == 1
    assert found("coupled", "--separability", "function of the batch=global") == found("declared") == 0


LINE = STEPS.splitlines().index("        return (x.softmax(-1).mean(0) ** 2).sum()") + 1


@pytest.mark.parametrize(
    ("pattern", "help_"),
    [
        (f"coupled_steps.py:{LINE + 1}", f"did you mean 'coupled_steps.py:{LINE}'?"),
        ("auxx", "did you mean 'aux'?"),
        ("nosuch.module", "name one of these"),
        ("function of the bach", "did you mean 'function of the batch'?"),
    ],
)
def test_a_declaration_that_fits_nothing_is_told(steps: Path, pattern: str, help_: str) -> None:
    for option in (f"{pattern}=global", f"{pattern}=per-microbatch"):
        result = invoke("check", "coupled_steps:coupled", "--json", "found.json", "--separability", option)
        assert "error[E0765]" in result.output and help_ in result.output
        told = json.loads((steps / "found.json").read_text())["separability"]
        assert not told["passed"] and told["findings"][0]["code"] == "E0765"
        assert "warning[E076" in result.output  # what couples is told as well
    code, said = compiled("coupled", "--separability", f"{pattern}=global")
    assert code == 1 and "error[E0765]" in said and help_ in said
    options = ("--cluster", "a100x2", "-o", "p.toml", "--separability", f"{pattern}=global")
    result = invoke("plan", "coupled_steps:coupled", *options)
    assert result.exit_code == 1 and "error[E0765]" in result.output


def test_a_kind_may_be_declared_in_any_case(steps: Path) -> None:
    given = ("--json", "found.json", "--separability", "contrastive loss=global;aux=global")
    result = invoke("check", "coupled_steps:coupled", *given)
    assert "separability: the step may be cut over its batch in any way\n" in result.output
    assert json.loads((steps / "found.json").read_text())["separability"]["passed"]


def test_groups_that_stand_for_the_batch_are_for_numbers_to_compare(steps: Path) -> None:
    assert compiled("declared")[0] == 0
    for options in ((), ("--relations",)):
        result = invoke("verify", "out", "--steps", 1, *options)
        assert result.exit_code == 0, result.output
        assert "relations do not apply" in result.output and "E0741" not in result.output
        assert ("nothing was compared" in result.output) == bool(options)
    result = invoke("verify", "out", "--steps", 1, "--json")
    told = json.loads(result.stdout)
    assert told["passed"] and not told["relations"]["proved"] and told["relations"]["not_applicable"]
    found = equivalence(read_given("out"), Clock(20.0)).json()
    assert found["passed"] and not found["findings"] and "relations do not apply" in str(found["headline"])


def test_the_parallel_section_of_a_file(tmp_path: Path) -> None:
    """A file whose model subtracts the mean over the batch."""
    text = SMALL.replace("    x = E[tokens]\n", "    x = E[tokens]\n    x = x - mean(x over b)\n")
    assert text != SMALL

    def made(*lines: str) -> tuple[int, str]:
        section = "".join(f"    {line}\n" for line in ("mesh data = 2", "microbatches 2", *lines))
        (tmp_path / "centred.mw").write_text(f"{text}\nparallel\n{section}", encoding="utf-8")
        result = invoke("compile", tmp_path / "centred.mw", "-o", tmp_path / "out")
        return result.exit_code, result.output

    code, said = made()
    assert code == 1 and "E0305" in said
    assert made('separability "global"')[0] == 0
    assert read_plan((tmp_path / "out" / "plan.toml").read_text()).separability == (Declaration("**", "global"),)
    assert made('separability "centred.mw:*=global", "per microbatch"')[0] == 0
    wanted = (Declaration("centred.mw:*", "global"), Declaration("**", "per microbatch"))
    assert read_plan((tmp_path / "out" / "plan.toml").read_text()).separability == wanted
    for lines, expected in (
        (['separability "globally"'], "E0765"),
        (["separability global"], "E0765"),
        (['separability "global"', 'separability "global"'], "E0106"),
    ):
        code, said = made(*lines)
        assert code == 1 and expected in said and "centred.mw:" in said
