"""Which ops become one kernel, and the bytes that it moves."""

from __future__ import annotations

from meshwright.compiler.summary import GraphSummary, Item, Kernel, Message
from meshwright.compiler.timeline.fusion import fused

SIZE = 100


def op(name: str, reads: tuple[int, ...], kind: str = "elementwise", phase: str = "forward", block: str = "") -> Item:
    work = Kernel(name, kind, 1.0, SIZE * len(reads), SIZE)  # type: ignore[arg-type]  # a kind
    return Item(name, phase, block, work, reads, tuple(SIZE for _ in reads))  # type: ignore[arg-type]  # a phase


def kernels(*items: Item, fusion: str = "compiled", results: tuple[int, ...] = ()) -> dict[int, tuple[int, int]]:
    """By position of the first op: what is read and written."""
    found = fused(GraphSummary(tuple(items), (), frozenset(results)), fusion)
    return {position: (k.read, k.written) for position, k in found.items()}


MATMUL = op("mm", (-1, -1), "matmul")


def test_without_fusion_every_op_is_a_kernel() -> None:
    assert set(kernels(op("exp", (-1,)), op("log", (0,)), fusion="none")) == {0, 1}


def test_a_chain_reads_its_input_and_writes_its_result() -> None:
    assert kernels(op("exp", (-1,)), op("log", (0,)), op("neg", (1,))) == {0: (SIZE, SIZE)}


def test_what_a_product_reads_is_written_and_read_again() -> None:
    chain = [op("exp", (-1,)), op("log", (0,)), op("mm", (0, 1), "matmul"), op("neg", (2,)), op("mul", (3, 1))]
    # of the chain before the product, both results are read outside; the one behind it reads the product and %log
    assert kernels(*chain) == {0: (SIZE, 2 * SIZE), 2: (2 * SIZE, SIZE), 3: (2 * SIZE, SIZE)}


def test_an_op_behind_a_product_does_not_join_the_kernel_before_it() -> None:
    found = kernels(op("exp", (-1,)), op("mm", (0, -1), "matmul"), op("mul", (0, 1)))
    assert found == {0: (SIZE, SIZE), 1: (2 * SIZE, SIZE), 2: (2 * SIZE, SIZE)}


def test_ops_on_both_sides_of_an_independent_product_are_one_kernel() -> None:
    found = kernels(MATMUL, op("silu", (0,)), op("mm", (-1, -1), "matmul"), op("mul", (1, 2)))
    assert found == {0: (2 * SIZE, SIZE), 1: (2 * SIZE, SIZE), 2: (2 * SIZE, SIZE)}


def test_chains_that_meet_are_one_kernel() -> None:
    rotary = [MATMUL, op("mul", (0, -1)), op("neg", (0,)), op("aten.cat.default", (2, 0), "copy"), op("mul", (3, -1))]
    assert kernels(*rotary, op("aten.add.Tensor", (1, 4))) == {0: (2 * SIZE, SIZE), 1: (3 * SIZE, SIZE)}


def test_chains_that_meet_behind_a_product_of_one_of_them_are_two() -> None:
    meeting = [op("exp", (-1,)), op("mm", (0, -1), "matmul"), op("neg", (1,)), op("mul", (0, 2))]
    assert set(kernels(*meeting)) == {0, 1, 2}


def test_ops_that_read_the_same_are_one_kernel() -> None:
    found = kernels(MATMUL, op("mul", (0, -1)), op("mul", (0, -1)), results=(1, 2))
    assert found == {0: (2 * SIZE, SIZE), 1: (3 * SIZE, 2 * SIZE)}


def test_views_are_looked_through() -> None:
    view = Item("view", "forward", "", Kernel("view", "view", 0.0, 0, 0), (0,), (SIZE,))
    assert kernels(op("exp", (-1,)), view, op("log", (1,))) == {0: (SIZE, SIZE)}


def test_nothing_is_fused_across_waits_or_blocks() -> None:
    message = Item("gather", "forward", "", Message("all-gather", ("data",), SIZE), (0,), (SIZE,))
    assert set(kernels(op("exp", (-1,)), message, op("log", (0,)))) == {0, 2}
    assert set(kernels(op("exp", (-1,), block="layers.0"), op("log", (0,), block="layers.1"))) == {0, 1}


def test_results_that_leave_the_graph_are_written() -> None:
    assert kernels(op("exp", (-1,)), op("log", (0,)), results=(0,)) == {0: (SIZE, 2 * SIZE)}


def test_by_hand_a_sum_that_several_read_ends_its_kernel() -> None:
    residual = [MATMUL, op("gelu", (0,)), op("aten.add.Tensor", (1, -1)), op("norm", (2,)), op("mul", (3, 2))]
    assert set(kernels(*residual)) == {0, 1}
    assert set(kernels(*residual, fusion="kernels")) == {0, 1, 3}


def test_the_ops_of_an_update_are_one_kernel_over_many_tensors() -> None:
    ops = [op("lerp", (-1, -1), phase="update"), op("mul", (-1,), phase="update"), op("div", (0, 1), phase="update")]
    for fusion in ("kernels", "compiled"):
        assert kernels(*ops, fusion=fusion, results=(0, 1, 2)) == {0: (3 * SIZE, 3 * SIZE)}
