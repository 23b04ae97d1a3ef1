"""Constants are found again from the step times that they give."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.published import plans
from benchmarks.published.fit import Priced, fit, fitted_rows
from benchmarks.published.fitted import FITTED, LIST
from benchmarks.published.predict import simulated
from benchmarks.published.reading import OWN, parse, read
from benchmarks.published.rows import Row
from benchmarks.published.score import chosen_for_fitting
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import Buffer, GraphSummary, Item, Kernel, RankSummary
from tests.unit.benchmarks.test_published import raw

TRUE = {"matmul": 0.7, "matmul_half": 200.0, "attention": 0.6, "attention_backward": 0.5, "memory": 0.75}


def summary(number: int, bytes_held: int) -> RankSummary:
    """Products, attention and copies in shares that depend on the number."""
    size, keys = 256 * (1 + number % 7), 512 << (number % 3)
    attention = (4, 16, keys, keys, 64)
    works = (
        Kernel("mm", "matmul", 2.0 * 4096 * size * size, 1, 1, "bf16", (1, 4096, size, size)),
        Kernel("attention", "attention", 4.0 * 64 * 64 * keys**2, 1, 1, "bf16", attention),
        Kernel("attention_backward", "attention", 10.0 * 64 * 64 * keys**2, 1, 1, "bf16", attention),
        Kernel("copy", "copy", 0.0, (50 + 40 * (number % 5)) << 20, 1 << 20),
    )
    items = tuple(Item(w.op, "forward", "", w) for w in works)
    held = Buffer(bytes_held, "activations", 0, len(items), "forward", "")
    graph = GraphSummary(items, (held,))
    return RankSummary(Mesh((("data", 4),)), 1, GraphSummary((), ()), graph, GraphSummary((), ()), {})


def priced(count: int) -> list[Priced]:
    """Rows with the times that the true constants give; those that need more than 70 GiB ran out of memory."""
    found: list[Priced] = []
    for number in range(count):
        row: Row = parse(raw(id=f"row {number}"))
        cluster = plans.cluster(row.machine)
        needed = 50 + number % 30
        made = summary(number, needed << 30)
        true = replace(cluster.device.efficiency, **TRUE)  # type: ignore[arg-type]  # floats, as their fields
        seconds = simulated(row, made, cluster, {cluster.device.name: true}).seconds
        fits = needed <= 70
        found.append((replace(row, seconds=seconds if fits else None, fits=fits), made, cluster))
    return found


def test_constants_are_found_again() -> None:
    rows = priced(60)
    constants = fit(rows, lambda _: None)
    found = constants["a100-80"]
    errors = [
        abs(simulated(row, made, cluster, constants).seconds / row.seconds - 1)
        for row, made, cluster in rows
        if row.seconds is not None
    ]
    assert max(errors) < 0.03
    for name in ("matmul", "attention", "attention_backward", "memory"):
        assert getattr(found, name) == pytest.approx(TRUE[name], rel=0.1)
    for row, made, cluster in rows:
        assert not chosen_for_fitting(row) or simulated(row, made, cluster, constants).fits == row.fits


def test_devices_with_few_rows_keep_their_constants() -> None:
    assert fit(priced(4), lambda _: None) == {}


def test_the_rows_of_the_catalogue_are_chosen_by_the_rule() -> None:
    known = {str(row["id"]) for row in read(OWN)}
    assert known >= FITTED
    assert len(FITTED) == len(set().union(*json.loads(LIST.read_text())["rows"].values())) >= 150
    example: Row = parse(raw())
    assert all(chosen_for_fitting(replace(example, id=name)) for name in FITTED)
    chosen = fitted_rows(priced(60))["a100"]
    assert set(chosen) == {f"row {n}" for n in range(60) if chosen_for_fitting(replace(example, id=f"row {n}"))}
