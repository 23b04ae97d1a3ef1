"""Published rows: read with all their gaps, mapped onto modules, plans and clusters, predicted and scored."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import __main__ as command
from benchmarks.published import modules, plans, states
from benchmarks.published.programs import Programs
from benchmarks.published.reading import OWN, parse, parse_all, read
from benchmarks.published.rows import Row, Unreadable
from benchmarks.published.score import Predicted, Scored, errors, feasibility, spearman, sweeps
from meshwright.compiler.memory import memory
from meshwright.compiler.plan import Recompute
from meshwright.compiler.timeline.materialised import materialised

RAW = {row["id"]: row for row in read(OWN)}
FSDP = "llmfoundry-7b-a100-80gb-bf16-s32768-g8-mb2-gb32-ckpt-full_shard"


def raw(**changes: Any) -> dict[str, Any]:
    """A small row of the published form, some of its fields (``part__name``) replaced."""
    row: dict[str, Any] = {
        "id": "small",
        "kind": "end_to_end",
        "source": {"title": "a source"},
        "model": {"name": "GPT-small", "layers": 3, "hidden": 64, "heads": 4, "kv_heads": None, "ffn": None,
                  "vocab": 96, "seq_len": 32, "experts": None, "params": None},
        "hardware": {"gpu": "A100-80GB", "gpus_per_node": 8, "num_gpus": 4, "interconnect": None},
        "parallel": {"tp": 1, "pp": 1, "dp": 4, "cp": None, "sp": False, "fsdp": "FULL_SHARD", "zero_stage": 3,
                     "microbatch": 2, "global_batch": 16, "recompute": "none", "precision": "bf16",
                     "offload": "none", "compile": None},
        "measured": {"iteration_time_s": 0.01, "tokens_per_s_per_gpu": None, "peak_memory_gib": None},
        "notes": "",
        "tier": "A",
    }  # fmt: skip
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            row[part] = {**row[part], field: value}
        else:
            row[part] = value
    return row


def test_most_rows_are_read_and_every_other_says_why() -> None:
    rows, skipped = parse_all(RAW.values())
    assert len(rows) + len(skipped) == len(RAW)
    assert len(rows) >= 700
    assert all(s.reason for s in skipped)
    pipelined = [row for row in rows if row.layout.pipe > 1]
    assert len(pipelined) >= 300
    assert all(row.layout.data * row.layout.tensor * row.layout.pipe == row.machine.count for row in pipelined)
    assert {row.layout.schedule for row in pipelined} == {"1f1b", "interleaved"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel__pp": 4, "parallel__dp": 1}, "4 stages for 3 layers"),
        ({"parallel__pp": 3}, "tensor 1 times pipeline 3 does not divide 4 devices"),
        ({"parallel__pp": 2, "parallel__vpp": 2, "parallel__dp": 2}, "4 stages for 3 layers"),
        ({"parallel__pp": 2, "parallel__dp": 2, "extra": {"schedule": "Chimera"}}, "schedule chimera"),
        ({"parallel__cp": 2}, "context"),
        ({"parallel__precision": "amp_fp8"}, "8 bits"),
        ({"parallel__precision": None}, "precision"),
        ({"parallel__offload": "cpu"}, "offloads"),
        ({"parallel__microbatch": None}, "microbatch"),
        ({"parallel__global_batch": 17}, "whole number of microbatches"),
        ({"parallel__tp": 3}, "does not divide"),
        ({"parallel__dp": 3}, "is not 4 devices"),
        ({"model__layers": None}, "layers"),
        ({"model__hidden": "wide"}, "width"),
        ({"model__heads": 5}, "heads"),
        ({"model__experts": 8}, "mixture"),
        ({"model": None}, "layers"),
        ({"hardware__gpu": None}, "device"),
        ({"hardware__num_gpus": -4}, "devices"),
        ({"measured": {}}, "nothing was measured"),
        ({"measured__iteration_time_s": float("nan")}, "nothing was measured"),
        ({"extra": {"suspect": "columns swapped"}}, "columns swapped"),
        ({"notes": "LoRA fine-tuning"}, "adapters"),
        ({"tier": "F", "measured": {}, "extra": {"status": "Kernel not available"}}, "other than memory"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        parse(raw(**changes))


def test_what_is_not_told_is_taken_from_what_is() -> None:
    row = parse(raw(parallel__dp=None, measured={"tokens_per_s_per_gpu": 1000.0}))
    assert row.layout.data == 4
    assert row.layout.microbatches == 2
    assert row.shape.inner == 256
    assert row.shape.key_value_heads == 4
    assert row.seconds == pytest.approx(16 * 32 / 4000)


def test_a_row_that_ran_out_of_memory_has_no_time() -> None:
    row = parse(raw(tier="F", measured={}, extra={"status": "OOM Error"}))
    assert row.fits is False
    assert row.seconds is None


@pytest.mark.parametrize("value", [None, "x", -1, 0, 0.5, 1e30, 10**400, [], {}, ["a"], True, float("nan")])
def test_nothing_that_a_row_may_hold_breaks_the_reading(value: Any) -> None:
    for row in (RAW[FSDP], raw(tier="M", extra={"formula_gb": 1.0})):
        for name, part in row.items():
            changed = [{**row, name: value}]
            if isinstance(part, dict):
                changed += [{**row, name: {**part, field: value}} for field in part]
            for one in changed:
                rows, skipped = parse_all([one])
                assert len(rows) + len(skipped) == 1
                assert all(plans.words(r.layout) and plans.recompute(r) for r in rows if r.habits.recompute != "none")
                states.states([one])


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("1600 Gbps/node RoCE", 25.0),
        ("400 Gbps per node", 6.25),
        ("Selene: NVLink3/NVSwitch; 8x HDR 200 Gb/s IB per node", 25.0),
        ("NVLink intra-node; 4x Omni-Path links per node (100 Gb/s each, from memory)", 6.25),
        ("RoCE 400 Gb/s per GPU, 3-layer Clos", 50.0),
        ("RoCE between nodes", None),
        ("", None),
    ],
)
def test_the_network_is_read_from_its_description(text: str, gigabytes: float | None) -> None:
    found = plans.network(text, 8)
    assert found == (None if gigabytes is None else pytest.approx(gigabytes * 1e9))


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("A100-80GB", "a100-80"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("H100-80GB", "h100"), ("H100 SXM5", "h100"),
        ("V100", "v100-32"), ("H200", "h200"), ("TPU v4", "tpu-v4"),
    ],
)  # fmt: skip
def test_devices_are_found_by_the_names_that_sources_give_them(gpu: str, name: str) -> None:
    assert plans.device(gpu).device.name == name


def test_an_unknown_device_is_told() -> None:
    with pytest.raises(Unreadable, match="no device 'Abacus 9'"):
        plans.device("Abacus 9")


@pytest.mark.parametrize("name", [FSDP, "llmfoundry-125m-a100-40gb-bf16-s2048-g8-mb26-gb624-full_shard"])
def test_modules_have_the_parameters_that_the_source_tells(name: str) -> None:
    row = parse(RAW[name])
    assert modules.parameters(row.shape, row.habits) == pytest.approx(row.parameters, rel=0.01)


def test_plans_follow_the_row() -> None:
    full = parse(RAW[FSDP])
    assert plans.words(full.layout) == "fsdp=8,micro=2"
    assert plans.recompute(full) == (Recompute("layers.0", "nothing"), Recompute("layers.1", "nothing"))
    assert plans.repeats(full) == {"layers.1": 31}
    some = parse(raw(parallel__recompute="selective", notes="AC 'selective layer'", model__layers=9))
    assert plans.recompute(some) == (Recompute("layers.0", "nothing"), Recompute("layers.2", "nothing"))
    # four that are recomputed and four that are not take turns, and one is left
    assert plans.repeats(some) == {"layers.2": 3, "layers.3": 3}
    assert sum(kind.count for kind in plans.arrangement(some)) == 9
    core = parse(raw(parallel__recompute="selective", notes="core attention", model__layers=2))
    assert plans.recompute(core) == tuple(Recompute(f"layers.{i}.attention.core", "nothing") for i in (0, 1))
    compiled = parse(raw(parallel__compile=True, model__layers=2))
    assert plans.recompute(compiled) == (Recompute("layers.0", "matmuls"), Recompute("layers.1", "matmuls"))
    hybrid = parse(raw(parallel__fsdp="HSDP", parallel__dp=16, hardware__num_gpus=16, parallel__global_batch=32))
    assert plans.words(hybrid.layout) == "ddp=2,fsdp=8"


def keeps(row: Row, programs: Programs) -> float:
    """What one more layer keeps for backward, in bytes for each element of the residual stream."""
    summary = programs.summary(row)
    ((block, _),) = plans.repeats(row).items()
    five, six = (replace(summary, repeats={block: count}) for count in (5, 6))
    most = [memory(materialised(s, row.habits.kernels)).most["activations"] for s in (five, six)]
    return (most[1] - most[0]) / (row.layout.microbatch * row.shape.time * row.shape.hidden)


def test_what_a_gated_layer_keeps() -> None:
    """16 + 8 f / h: inputs and results of two norms, queries, keys, values and what attention makes of them, and four
    of the width f. A compiler keeps the layer's input and results of products and attention: 12 + 4 f / h."""
    shape: dict[str, Any] = {"model__name": "Llama", "model__ffn": 160, "parallel__global_batch": 8}
    row, programs = parse(raw(**shape)), Programs(None)
    few = 4 * row.shape.heads / row.shape.hidden + 2 * 4 / row.shape.hidden  # logsumexp, and deviations of the norms
    assert keeps(row, programs) == pytest.approx(16 + 8 * 160 / 64 + few, abs=0.07)
    compiled = parse(raw(**shape, parallel__compile=True))
    assert keeps(compiled, programs) == pytest.approx(12 + 4 * 160 / 64 + few, abs=0.2)


def scored(seconds: float | None, predicted: float, fits: bool = True, says: bool = True, **changes: Any) -> Scored:
    row = raw(measured={"iteration_time_s": seconds}, tier="A" if fits else "F", **changes)
    return Scored(parse(row), Predicted(predicted, 1.0, says), False)


def test_scores_of_a_sweep() -> None:
    rows = [
        scored(1.0, 1.1, parallel__microbatch=1),
        scored(2.0, 1.0, parallel__microbatch=2),
        scored(3.0, 3.3, parallel__microbatch=4),
        scored(None, 0.5, fits=False, says=True, parallel__microbatch=4, parallel__recompute="full"),
    ]
    (sweep,) = sweeps(rows)
    assert (sweep.measured, sweep.failed) == (3, 1)
    assert sweep.regret == pytest.approx(1.0)  # the plan held for the fastest takes twice as long as the best
    assert sweep.correlation == pytest.approx(0.5)
    assert sweep.picks_failing
    found = errors(rows)
    assert found is not None
    assert found.median == pytest.approx(0.1)
    fits = feasibility(rows)
    assert fits is not None
    assert (fits.rows, fits.right, fits.wrongly_fits, fits.wrongly_fails) == (4, 3, 1, 0)


def test_ranks_with_ties() -> None:
    assert spearman([(1, 1), (2, 2), (2, 2), (3, 9)]) == pytest.approx(1.0)
    assert spearman([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1.0)
    assert spearman([(1, 1), (2, 2)]) is None


def test_the_command_scores_a_file_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        raw(),
        raw(),  # the same id again
        raw(id="odd", parallel={**raw()["parallel"], "tp": 4, "dp": 1, "fsdp": None, "sp": True}, model__vocab=97),
        raw(id="impossible", model__hidden=60, model__name="Llama-odd"),  # rotary positions need even channels
        raw(id="elsewhere", hardware__gpu="Abacus 9"),
        raw(id="long", parallel={**raw()["parallel"], "pp": 2, "dp": 2, "fsdp": None, "zero_stage": 1}),
        raw(id="longer", parallel__pp=4),
        "no row at all",
        {},
    ]
    file, out = tmp_path / "rows.json", tmp_path / "out.json"
    file.write_text(json.dumps(rows))
    assert command.main(["--rows", str(file), "--json", str(out), "--cache", str(tmp_path / "cache")]) == 0
    told = capsys.readouterr().out
    assert "is not 4 devices" in told
    found = json.loads(out.read_text())
    assert [r["id"] for r in found["rows"]] == ["small", "small", "odd", "long"]
    assert all(r["predicted_s"] > 0 and r["predicted_gib"] > 0 for r in found["rows"])
    assert found["rows"][0]["predicted_s"] == found["rows"][1]["predicted_s"]
    assert {s["id"] for s in found["skipped"]} == {"impossible", "elsewhere", "longer", "row 7", "row 8"}
    assert all(s["reason"] for s in found["skipped"])
    assert found["held out"]["rows"] == 4
    assert found["constants"]["a100-80"]["matmul"] > 0


@pytest.mark.parametrize("text", ["", "{", '{"rows": 3}', "7"])
def test_a_file_that_holds_no_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    file = tmp_path / "rows.json"
    file.write_text(text)
    assert command.main(["--rows", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_rows_are_not_changed_by_reading() -> None:
    before = copy.deepcopy(RAW[FSDP])
    parse(RAW[FSDP])
    assert RAW[FSDP] == before


def test_rows_of_a_sweep_share_all_but_the_plan() -> None:
    first: Row = parse(raw(parallel__microbatch=1))
    second: Row = parse(raw(parallel__microbatch=4, parallel__recompute="full"))
    assert first.sweep == second.sweep
    assert first.sweep != parse(raw(parallel__global_batch=32)).sweep
