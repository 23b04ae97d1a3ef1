"""A pass that makes of a step another one is named, and the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from meshwright.bisection import bisect
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.program import Graph, StepProgram
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.passes import compile as compiling
from meshwright.compiler.passes import lower as lowering
from meshwright.compiler.passes import pipeline
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Plan
from tests.equivalence.editing import done, set_argument
from tests.equivalence.faults import FAULTS
from tests.models import Variant
from tests.parity.harness import Task, captured, compiled

TASK = Task("gpt.mw", Variant(dropout=0.1))
STAGED = Task("gpt.mw", Variant(layers=3))


def step(task: Task, text: str, ranks: int, microbatches: int = 1) -> tuple[StepProgram, Plan]:
    program = captured(task)
    return program, replace(preset(text, program, ranks), microbatches=microbatches)


def broken(pass_: Callable[..., Any], spoil: Callable[[Any], None]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        made = pass_(*args, **kwargs)
        spoil(made)
        return made

    return run


def test_a_correct_step_has_no_such_pass() -> None:
    assert bisect(*step(TASK, "fsdp=2,recompute,prefetch=1,offload", 2, 2)) is None
    assert bisect(*step(STAGED, "pp=2,ddp=2", 4, 4)) is None


def test_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(graph: Graph) -> None:
        again = [n for n in graph.module.graph.nodes if str(n.target).startswith("meshwright.dropout")]
        again[-1].args = (*again[-1].args[:3], 99, *again[-1].args[4:])

    from meshwright.compiler.passes.recompute import recompute

    monkeypatch.setattr("meshwright.bisection.recompute", broken(recompute, spoil))
    found = bisect(*step(TASK, "fsdp=2,recompute", 2))
    assert found is not None
    assert found.name == "recompute"
    assert found.finding.node.startswith("dropout")


def test_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_offset(self: Any, segment: Any) -> int:
        return 0

    monkeypatch.setattr(lowering._Lowering, "_offset", without_offset)
    found = bisect(*step(TASK, "tp=2", 2))
    assert found is not None
    assert found.name == "lower"
    assert found.finding.node == "embedding_default"


def test_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "bucket", broken(compiling.bucket, _first_two_alike))
    found = bisect(*step(TASK, "fsdp=2", 2))
    assert found is not None
    assert found.name == "bucket"


def _first_two_alike(local: LocalGraph) -> None:
    """Two weights of one shape change places in their message."""
    for node in local.module.graph.find_nodes(op="call_function", target=collectives.all_gather_many):
        for i, x in enumerate(node.args[0]):
            for j, y in enumerate(node.args[0]):
                if i < j and x.meta["val"].shape == y.meta["val"].shape and node.args[1][i] == node.args[1][j]:
                    tensors = list(node.args[0])
                    tensors[i], tensors[j] = y, x
                    set_argument(local, node, 0, tensors)
                    return


def test_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "overlap", broken(compiling.overlap, _waits_swapped))
    found = bisect(*step(TASK, "fsdp=2,prefetch=1", 2))
    assert found is not None
    assert found.name == "overlap"


def _waits_swapped(local: LocalGraph) -> None:
    """Two results of one message are taken for each other."""
    for node in local.module.graph.find_nodes(op="call_function", target=collectives.wait):
        items = sorted(node.users, key=lambda u: u.args[1])
        for a in items:
            for b in items:
                same = a.meta.get("val") is not None and b.meta.get("val") is not None
                if a is not b and same and a.meta["val"].shape == b.meta["val"].shape:
                    a.args, b.args = b.args, a.args
                    done(local)
                    return


def test_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(local: LocalGraph) -> None:
        nodes = local.module.graph.find_nodes(op="call_function", target=torch.ops.meshwright.to_host.default)
        first, second = next((a, b) for a in nodes for b in nodes if a is not b and _alike(a, b))
        first.args, second.args = (second.args[0], first.args[1]), (first.args[0], second.args[1])
        done(local)

    monkeypatch.setattr(compiling, "offload", broken(compiling.offload, spoil))
    found = bisect(*step(TASK, "fsdp=2,offload", 2))
    assert found is not None
    assert found.name == "offload"


def _alike(first: fx.Node, second: fx.Node) -> bool:
    return bool(first.args[0].meta["val"].shape == second.args[0].meta["val"].shape)  # type: ignore[union-attr]


def test_untie(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.compiler.passes.untie import untie

    def spoil(program: StepProgram) -> None:
        add = next(n for n in program.update.module.graph.nodes if n.target is torch.ops.aten.add.Tensor)
        add.replace_all_uses_with(add.args[0])

    monkeypatch.setattr("meshwright.bisection.untie", broken(untie, spoil))
    found = bisect(*step(STAGED, "pp=2,ddp=2", 4, 4))
    assert found is not None
    assert found.name == "untie"


def test_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.compiler.passes.pieces import split

    def spoil(pieces: Any) -> None:
        piece = pieces.get((0, "I"))
        if piece is not None:
            graph = piece.graph
            node = next(n for n in graph.module.graph.nodes if n.op == "call_function" and "einsum" in str(n.target))
            node.args = (node.args[0], node.args[2], node.args[1])

    monkeypatch.setattr(pipeline, "split", broken(split, spoil))
    monkeypatch.setattr(pipeline, "finished", lambda local, mesh, **options: local)
    found = bisect(*step(STAGED, "pp=2,ddp=2", 4, 4))
    assert found is not None
    assert found.name == "stages"


def test_a_program_changed_afterwards() -> None:
    (fault,) = (f for f in FAULTS if f.name == "sum missing over tensor, forward")
    program = compiled(fault.cell)
    fault.put(program)
    found = bisect(program.program, program.plan, program)
    assert found is not None
    assert found.name == "program"
    assert "add_tensor" in str(found)


def test_numbers_where_relations_are_not_asked() -> None:
    program, plan = step(Task("gpt.mw"), "ddp=2", 2)
    assert bisect(program, plan, numbers=True) is None
