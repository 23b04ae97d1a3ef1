"""Traffic of a step: bytes by collective, axis and graph, padding and joined reductions included."""

from __future__ import annotations

from meshwright.compiler.analysis.summarize import summarize, summarize_graph
from meshwright.compiler.communication import Traffic, communication, graph_traffic
from meshwright.compiler.graph.text_parser import parse_local_graph
from meshwright.compiler.mesh import Mesh
from tests.unit.small_step import small_rank_program

MESH = Mesh((("micro", 1), ("data", 2), ("tensor", 4)))


def traffic(line: str, type_: str, given: str) -> list[tuple[str, tuple[str, ...], int, int, int]]:
    text = f'local graph a\n  %x: {given} = input batch "x"\n  %y: {type_} = {line}\n  output result "y" = %y\n'
    found = graph_traffic(summarize_graph(parse_local_graph(text)[1], MESH), MESH, "a")
    return [(t.kind, t.axes, t.calls, t.payload, t.sent) for t in found]


def test_a_step_counts_every_microbatch() -> None:
    assert communication(summarize(small_rank_program())) == [
        Traffic("prologue", "all-reduce", ("data",), 1, 8, 8),
        Traffic("micro", "all-gather", ("data",), 2, 2 * 192, 2 * 96),
        Traffic("micro", "reduce-scatter", ("data",), 2, 2 * 192, 2 * 96),
    ]


def test_rings() -> None:
    assert traffic('all_reduce(%x, ("tensor",), "sum")', "f32[16]", "f32[16]") == [
        ("all-reduce", ("tensor",), 1, 64, 96)
    ]
    assert traffic('all_gather(%x, 0, ("data", "tensor"), 16)', "f32[16]", "f32[2]") == [
        ("all-gather", ("data", "tensor"), 1, 64, 56)
    ]
    assert traffic('reduce_scatter(%x, 1, ("tensor",))', "f32[2, 2]", "f32[2, 8]") == [
        ("reduce-scatter", ("tensor",), 1, 64, 48)
    ]
    assert traffic('all_to_all(%x, 0, 1, "tensor", 8)', "f32[2, 8]", "f32[8, 2]") == [
        ("all-to-all", ("tensor",), 1, 64, 48)
    ]


def test_padding_is_sent_too_and_axis_by_axis() -> None:
    # 15 elements on 2 x 4 ranks: chunks of 8, then of 2; gathered over tensor to 8, then over data to 16
    assert traffic('all_gather(%x, 0, ("data", "tensor"), 15)', "f32[15]", "f32[2]") == [
        ("all-gather", ("tensor",), 1, 32, 24),
        ("all-gather", ("data",), 1, 64, 32),
    ]


def test_logsumexp_is_two_reductions() -> None:
    assert traffic('all_reduce(%x, ("data",), "logsumexp")', "f32[4]", "f32[4]") == [
        ("all-reduce", ("data",), 2, 32, 32)
    ]


def test_local_work_and_axes_of_one_rank_send_nothing() -> None:
    assert traffic('shard(%x, 0, ("data",))', "f32[4]", "f32[8]") == []
    text = 'local graph a\n  %x: f32[4] = input batch "x"\n  %y: f32[4] = all_reduce(%x, ("one",), "sum")\n'
    mesh = Mesh((("one", 1),))
    assert graph_traffic(summarize_graph(parse_local_graph(text)[1], mesh), mesh, "a") == []
