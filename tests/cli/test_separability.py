"""``--separability``: of the commands that compile, plan and check; and what a factory declares itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    assert compiled("coupled", "--separability", "first=global")[0] == 1


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

    assert found("coupled") == found("coupled", "--separability", "first=global") == 1
    assert found("coupled", "--separability", "function of the batch=global") == found("declared") == 0


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
