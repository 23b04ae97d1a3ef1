"""Fused kernels need no memory for what is made and read within them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.memory import memory
from meshwright.compiler.prediction import Execution
from meshwright.compiler.summary import Buffer, GraphSummary, Item, Kernel, RankSummary
from meshwright.compiler.timeline import simulate
from meshwright.compiler.timeline.materialised import materialised
from tests.unit.timeline.steps import CLUSTER, EMPTY, MESH

SIZE = 100


def op(name: str, reads: tuple[int, ...], kind: str = "elementwise", phase: str = "forward") -> Item:
    work = Kernel(name, kind, 1.0, SIZE * len(reads), SIZE)  # type: ignore[arg-type]  # a kind
    return Item(name, phase, "", work, reads, tuple(SIZE for _ in reads))  # type: ignore[arg-type]  # a phase


def made(item: int, last: int, items: list[Item]) -> Buffer:
    kind = "activations" if items[item].phase == "forward" else "temporaries"
    return Buffer(SIZE, kind, item, last, items[item].phase, "", items[item].name)


def summary(items: list[Item], *buffers: Buffer) -> RankSummary:
    return RankSummary(MESH, 1, EMPTY, GraphSummary(tuple(items), buffers), EMPTY, {})


def left(found: RankSummary, fusion: str) -> list[str]:
    return [b.name for b in materialised(found, fusion).micro.buffers]


def test_a_value_within_a_chain_is_never_written() -> None:
    items = [op("exp", (-1,)), op("log", (0,)), op("mm", (1,), "matmul")]
    found = summary(items, made(0, 1, items), made(1, 2, items), made(2, 3, items))
    assert left(found, "none") == ["exp", "log", "mm"]
    assert left(found, "compiled") == ["log", "mm"]
    # what is there at the end of the graph stays, whoever made it
    assert memory(materialised(found, "compiled")).peak == 2 * SIZE
    assert simulate(found, CLUSTER, Execution("compiled")).memory.peak == 2 * SIZE
    assert simulate(found, CLUSTER).memory.peak == 2 * SIZE


def test_what_backward_reads_is_kept() -> None:
    items = [op("exp", (-1,)), op("log", (0,)), op("mm", (1,), "matmul"), op("mul", (0, 2), phase="backward")]
    found = summary(items, made(0, 3, items), made(1, 2, items))
    assert left(found, "compiled") == ["exp", "log"]


@pytest.mark.parametrize("fusion", ["kernels", "compiled"])
def test_an_op_that_is_written_in_others_needs_no_room_on_the_way(fusion: str) -> None:
    item = op("loss", (-1,), "reduction")
    assert isinstance(item.work, Kernel)
    parts = (replace(item.work, op="exp"), replace(item.work, op="sum"))
    items = [replace(item, work=replace(item.work, parts=parts)), op("mm", (0, -1), "matmul")]
    found = summary(
        items, made(0, 1, items), Buffer(7 * SIZE, "workspace", 0, 0, "forward", "", "loss"),
        # a copy of an operand that does not lie as a product wants it is made by any kernel
        Buffer(3 * SIZE, "workspace", 1, 1, "forward", "", "mm"),
    )  # fmt: skip
    assert [(b.name, b.bytes) for b in materialised(found, fusion).micro.buffers] == [("loss", SIZE), ("mm", 3 * SIZE)]
    assert materialised(found, "none") == found
