"""Plans written as TOML and read back, and what is said about broken ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compiler.diagnostics import MeshwrightError, Span, nearest
from meshwright.compiler.mesh import Mesh, Segment, Sharding
from meshwright.compiler.plan import Hashes, ParameterPlan, Plan, Precision, Recompute, Storage
from meshwright.compiler.plan_file import check_made_for, plan_to_toml, read_plan

AXES = ("data", "tensor", "x_1")


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...], owes: bool = False) -> Sharding:
    free = list(draw(st.permutations(AXES)))
    dims = tuple(
        (Segment(n, tuple(free.pop() for _ in range(draw(st.integers(0, min(2, len(free))))))),) for n in shape
    )
    owed = [(axis, "sum") for axis in free if owes and draw(st.booleans())]
    return Sharding(dims, frozenset(owed))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    axes = st.lists(st.sampled_from(AXES), unique=True, max_size=2).map(tuple)
    entries = []
    for pattern in draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=3)):
        shape = tuple(draw(st.lists(st.integers(1, 99), max_size=3)))
        maybe = st.none() | shardings(shape)
        gradient = st.none() | shardings(shape, owes=True)
        entries.append(ParameterPlan(pattern, draw(shardings(shape)), draw(maybe), draw(gradient), draw(maybe)))
    return Plan(
        Mesh(tuple((axis, draw(st.integers(1, 64))) for axis in AXES)),
        draw(axes),
        draw(st.integers(1, 8)),
        Storage(draw(axes), draw(axes), draw(axes)),
        draw(axes),
        tuple(entries),
        Precision(draw(st.sampled_from(["fp32", "bf16"])), "fp64", "fp32"),
        recompute=tuple(
            Recompute(pattern, draw(st.sampled_from(["nothing", "matmuls", "all"])), draw(st.integers(1, 5)))
            for pattern in draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=3))
        ),
        offload=draw(st.sampled_from([(), ("state",)])),
        prefetch=draw(st.integers(0, 3)),
        hashes=Hashes(draw(st.text(max_size=6)), draw(st.sampled_from(["", "2.13.0"]))),
        name=draw(st.text(max_size=10)),
    )


@settings(max_examples=150, deadline=None)
@given(plans())
def test_a_written_plan_reads_back_equal(plan: Plan) -> None:
    text = plan_to_toml(plan)
    assert read_plan(text) == plan
    assert plan_to_toml(read_plan(text)) == text


# ruff: noqa: E501 (a plan on one line)
GOOD = "[mesh]\ndata = 2\ntensor = 2\n"


@pytest.mark.parametrize(
    ("text", "code", "line", "column"),
    [
        ("a = = 1\n", "E0311", 1, 5),
        ("microbatches = 2\n", "E0314", 1, 1),
        ("[mesh]\ndata = 0\n", "E0318", 2, 8),
        ("[mesh]\nmicro = 2\n", "E0318", 2, 1),
        ('[mesh]\n"a b" = 2\n', "E0318", 2, 1),
        ("[mesh]\ndata = true\n", "E0318", 2, 8),
        ("btach = []\n" + GOOD, "E0312", 1, 1),
        ("[mesh]\ndata = 2\n[storage]\ngradient = []\n", "E0312", 4, 1),
        ('batch = "data"\n' + GOOD, "E0313", 1, 9),
        ("batch = [1]\n" + GOOD, "E0313", 1, 9),
        ("microbatches = 0\n" + GOOD, "E0319", 1, 16),
        ('batch = ["data", "dta"]\n' + GOOD, "E0315", 1, 19),
        ('batch = ["data",\n  "data"]\n' + GOOD, "E0316", 2, 4),
        (GOOD + '[precision]\ncompute = "fp8"\n', "E0321", 5, 11),
        (GOOD + '[[parameters]]\npattern = "a"\ncompute = "[4@data, b]"\n', "E0317", 6, 21),
        (GOOD + '[[parameters]]\npattern = "a"\ncompute = "4"\n', "E0317", 6, 12),
        (GOOD + '[[parameters]]\npattern = "a"\ncompute = "[4@data, 4@data]"\n', "E0316", 6, 23),
        (GOOD + '[[parameters]]\npattern = "a"\ncompute = "[4] +data"\n', "E0317", 6, 16),
        (GOOD + '[[parameters]]\npattern = "a"\ncompute = "[4, 0]"\n', "E0322", 6, 16),
        (GOOD + '[[parameters]]\npattern = "a"\ncompute = "[4]"\nrest = "[5]"\n', "E0322", 7, 8),
        (GOOD + '[[parameters]]\npattern = "a"\n', "E0314", 4, 1),
        (GOOD + '[[parameters]]\npattern = "a"\ncompute = "[4]"\n[[parameters]]\npattern = "a"\ncompute = "[4]"\n', "E0320", 8, 11),
        ("parameters = [1]\n" + GOOD, "E0313", 1, 14),
        ("recompute = [1]\n" + GOOD, "E0313", 1, 13),
        (GOOD + '[[recompute]]\nsave = "all"\n', "E0314", 4, 1),
        (GOOD + '[[recompute]]\npattern = "a.*"\n[[recompute]]\npattern = "a.*"\n', "E0320", 7, 11),
        (GOOD + '[[recompute]]\npattern = "a.*"\nsave = "matmul"\n', "E0333", 6, 8),
        (GOOD + '[[recompute]]\npattern = "a.*"\nevery = 0\n', "E0334", 6, 9),
        (GOOD + '[[recompute]]\npattern = "a.*"\nevry = 2\n', "E0312", 6, 1),
        ("offload = [1]\n" + GOOD, "E0313", 1, 11),
        ('offload = ["weights"]\n' + GOOD, "E0336", 1, 13),
        ('offload = ["state", "state"]\n' + GOOD, "E0336", 1, 22),
        ("prefetch = -1\n" + GOOD, "E0337", 1, 12),
        ("prefetch = true\n" + GOOD, "E0313", 1, 12),
    ],
)  # fmt: skip
def test_a_fault_is_told_with_its_place(text: str, code: str, line: int, column: int) -> None:
    with pytest.raises(MeshwrightError) as caught:
        read_plan(text)
    first = caught.value.diagnostics[0]
    assert first.code == code
    assert isinstance(first.place, Span)
    assert (first.place.line, first.place.column) == (line, column)
    assert first.action


def test_all_faults_are_told_at_once_in_order() -> None:
    with pytest.raises(MeshwrightError) as caught:
        read_plan('microbatches = 0\nbatch = ["d"]\n[mesh]\nmicro = 0\n')
    assert [d.code for d in caught.value.diagnostics] == ["E0319", "E0315", "E0318", "E0318"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="E0323"):
        read_plan(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MeshwrightError, match="E0311"):
        read_plan(tmp_path / "binary.toml")


def test_hashes() -> None:
    plan = Plan(Mesh((("data", 2),)), hashes=Hashes("aaaa", "2.13"))
    assert check_made_for(plan, Hashes("aaaa", "2.13")) == []
    assert check_made_for(plan, Hashes("aaaa", "2.13+cpu")) == []
    assert [d.code for d in check_made_for(plan, Hashes("aaaa", "2.14"))] == ["W0310"]
    with pytest.raises(MeshwrightError, match="E0310"):
        check_made_for(plan, Hashes("bbbb", "2.13"))
    assert check_made_for(Plan(plan.mesh), Hashes("bbbb", "2.13")) == []


def test_plans_need_no_torch() -> None:
    code = "import sys, meshwright.compiler.plan_file; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_of_other_case_is_the_nearest() -> None:
    assert nearest("Adamw", ["Adam", "AdamW", "Adamax"]) == "AdamW"
    assert nearest("Adm", ["Adam", "AdamW"]) == "Adam"
    assert nearest("zzz", ["Adam"]) is None


def test_a_plan_from_the_first_layers_knows_the_model_by_its_outline() -> None:
    plan = Plan(Mesh((("data", 2),)), hashes=Hashes(torch="2.13", outline="aaaa"))
    again = read_plan(plan_to_toml(plan))
    assert again.hashes == plan.hashes and "model =" not in plan_to_toml(plan)
    assert check_made_for(again, Hashes("whatever", "2.13", outline="aaaa")) == []
    with pytest.raises(MeshwrightError, match="delete the line 'outline") as caught:
        check_made_for(again, Hashes("whatever", "2.13", outline="bbbb"))
    assert caught.value.diagnostics[0].code == "E0310"
