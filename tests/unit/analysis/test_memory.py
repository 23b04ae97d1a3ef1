"""Memory of a rank: against numbers worked out by hand, and against tensors that really lived."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.compiler.analysis.inplace import in_place
from meshwright.compiler.analysis.storage import storages
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.emit.artefact import read_artefact, write_artefact
from meshwright.compiler.emit.manifest import SourceDescription
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.text_parser import parse_local_graph
from meshwright.compiler.memory import memory
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.train_settings import TrainSettings
from tests.unit.emit.test_artefact import OneRank
from tests.unit.small_step import small_rank_program

MESH = Mesh((("micro", 1), ("data", 2)))


def test_the_peak_and_its_moment() -> None:
    found = memory(summarize(small_rank_program()))
    # w and momentum 3x4, bias 6, the accumulator 3x4; x 2x4 and the count of valid samples; in the backward:
    # the loss, d_out 2x6 and the gradient 6x4 before it is scattered; all float64
    assert found.by_kind == {
        "parameters": 96,
        "optimizer state": 96,
        "constants": 48,
        "gradients": 96,
        "batch": 64 + 8,
        "activations": 8,
        "temporaries": 96 + 192,
    }
    assert found.peak == sum(found.by_kind.values())
    assert (found.at.graph, found.at.item, found.at.phase, found.at.block) == ("micro", "grad", "backward", "layer")
    assert found.most["gathered parameters"] == 6 * 4 * 8
    # update: held 240, learning rate 8, and the gradient until m has it, or then m times the learning rate; 0.9 m, the
    # new m and the new w are written where m and w are
    assert found.by_graph["update"] == 240 + 8 + 96


def test_one_microbatch_needs_no_accumulator() -> None:
    from dataclasses import replace

    program = small_rank_program()
    program.plan = replace(program.plan, microbatches=1)
    assert memory(summarize(program)).peak == memory(summarize(small_rank_program())).peak - 96


class Watch(TorchDispatchMode):
    """The bytes of all tensors made under it that are alive, and the most of them at the end of an op."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[weakref.ref[Tensor]] = []
        self.known: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [x for x in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(x, Tensor)]
        self.alive = [r for r in (*self.alive, *map(weakref.ref, made)) if r() is not None]
        sizes = {}
        for reference in self.alive:
            tensor = reference()
            if tensor is not None and tensor.untyped_storage().data_ptr() not in self.known:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(sizes.values()))
        return result


def test_the_generated_python_needs_what_is_predicted(tmp_path: Any) -> None:
    write_artefact(small_rank_program(), tmp_path / "build", SourceDescription("language", "a.mw"), TrainSettings())
    program = read_artefact(tmp_path / "build").rank_program
    inputs = [torch.randn(3, 4).double(), torch.randn(2, 4).double(), torch.arange(6).double(), torch.tensor(5)]
    watch = Watch()
    watch.known = {x.untyped_storage().data_ptr() for x in inputs}
    with collectives.use(OneRank()), watch:
        program.micro.module(*inputs)
    predicted = memory(summarize(program))
    made = {kind: size for kind, size in predicted.by_kind.items() if kind in ("activations", "temporaries")}
    assert watch.peak == sum(made.values())


@pytest.mark.parametrize(
    ("line", "shares"),
    [
        ("aten.view.default(%x, [4, 2])", True),
        ("aten.reshape.default(%x, [4, 2])", True),
        ("aten.permute.default(%x, [1, 0])", True),
        ("aten._unsafe_view.default(%x, [4, 2])", True),
        ("aten.clone.default(%x)", False),
        ("aten.relu.default(%x)", False),
        ('shard(%x, 0, ("data",))', True),
        ('all_reduce(%x, ("data",), "sum")', False),
    ],
)
def test_views_share_memory(line: str, shares: bool) -> None:
    text = f'local graph a\n  %x: f32[2, 4] = input batch "x"\n  %y: f32[4, 2] = {line}\n  output result "y" = %y\n'
    nodes = list(parse_local_graph(text)[1].module.graph.nodes)
    owned = storages(nodes, MESH).owned
    assert (owned[nodes[1]] == owned[nodes[0]]) is shares


def test_results_of_one_op_are_separate() -> None:
    text = (
        'local graph a\n  %x: f32[2, 4] = input batch "x"\n'
        "  %pair: (f32[4], i64[4]) = aten.max.dim(%x, 0)\n"
        "  %a: f32[4] = operator.getitem(%pair, 0)\n  %b: i64[4] = operator.getitem(%pair, 1)\n"
        '  output result "a" = %a\n  output result "b" = %b\n'
    )
    nodes = {n.name: n for n in parse_local_graph(text)[1].module.graph.nodes}
    owned = storages(nodes.values(), MESH).owned
    assert [s.bytes for s in owned[nodes["a"]]] == [16]
    assert [s.bytes for s in owned[nodes["b"]]] == [32]
    assert set(owned[nodes["pair"]]) == {*owned[nodes["a"]], *owned[nodes["b"]]}


def test_update_finishes_one_parameter_after_the_other() -> None:
    names = ("a", "b")
    text = "local graph update\n"
    text += "".join(f'  %{n}: f32[8] = input parameter "{n}"\n  %g_{n}: f32[8] = input gradient "{n}"\n' for n in names)
    text += "".join(f"  %s_{n}: f32[8] = aten.mul.Tensor(%g_{n}, 0.1)\n" for n in names)
    text += "".join(f"  %new_{n}: f32[8] = aten.sub.Tensor(%{n}, %s_{n})\n" for n in names)
    text += "".join(f'  output parameter "{n}" = %new_{n}\n' for n in names)
    graph = parse_local_graph(text)[1]
    order = [n.name for n in in_place(graph).order if n.op != "placeholder"]
    assert order == ["s_a", "new_a", "s_b", "new_b"]
