"""Ops that are written in ops of torch run those, as many and as large as the summary says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from meshwright.compiler.analysis.kernels import kernel
from meshwright.compiler.cluster.device import Device, Efficiency
from meshwright.compiler.cluster.kernels import kernel_seconds
from meshwright.compiler.graph.adapter import TorchDispatchMode, written_in_ops
from meshwright.compiler.graph.ops.library import KERNELS
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.prediction import Execution
from meshwright.compiler.summary import GraphSummary, Item, RankSummary
from meshwright.compiler.timeline import simulate
from tests.unit.timeline.steps import CLUSTER, EMPTY

X, SEED = torch.randn(4, 6, 32), torch.tensor([1, 2])
ATTENDED = (*(torch.randn(2, 3, 8, 16) for _ in range(3)), None)
FORM = (True, 0, 0.25)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dropout": (torch.ops.meshwright.dropout.default, (X, SEED, 0.1, 3, [], [])),
    "a sum in a wider dtype": (torch.ops.meshwright.logsumexp.default, (X.bfloat16(),)),
    "attention with dropout": (torch.ops.meshwright.attention.default, (*ATTENDED, SEED, *FORM, 0.1, 5, [], [])),
}


class Counter(TorchDispatchMode):
    """Notes what really runs; of torch's logsumexp, what its reference runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.logsumexp.default:
            with self:
                return written_in_ops(func)[func](*args)
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view:
            self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def node(target: Any, given: tuple[Any, ...]) -> fx.Node:
    graph = fx.Graph()
    arguments = []
    for value in given:
        if isinstance(value, Tensor):
            at = graph.placeholder(f"x{len(arguments)}")
            at.meta["val"] = value.to("meta")
            value = at
        arguments.append(value)
    made = graph.call_function(target, tuple(arguments))
    result = target(*(g.to("meta") if isinstance(g, Tensor) else g for g in given))
    made.meta["val"] = result
    return made


@pytest.mark.parametrize("name", CALLS)
def test_the_parts_are_what_runs(name: str) -> None:
    target, given = CALLS[name]
    found, _ = kernel(node(target, given), {})
    counter = Counter()
    with counter:
        KERNELS[target._schema.name.partition("::")[2]](*given)
    assert [p.op for p in found.parts] == counter.ran
    assert sum(p.read + p.written for p in found.parts) > found.read + found.written


def test_a_fused_attention_and_an_op_of_torch_have_no_parts() -> None:
    plain = (torch.ops.meshwright.attention.default, (*ATTENDED, None, *FORM, 0.0, 0, [], []))
    assert kernel(node(*plain), {})[0].parts == ()
    assert kernel(node(torch.ops.aten.mul.Tensor, (X, X)), {})[0].parts == ()


def test_parts_are_paid_one_by_one_unless_ops_are_fused() -> None:
    found, _ = kernel(node(*CALLS["dropout"]), {})
    cpu = Device("cpu", {"f32": 1e10}, 1 << 30, 1e9, 1e9, Efficiency(launch=1e-5))
    micro = GraphSummary((Item("x", "forward", "", found),), ())
    step = RankSummary(Mesh((("data", 1),)), 1, EMPTY, micro, EMPTY, {})
    cluster = type(CLUSTER)("cpu", cpu, (CLUSTER.tiers[0],))
    whole = simulate(step, cluster, Execution("kernels")).seconds
    assert whole == pytest.approx(kernel_seconds(cpu, found) + 1e-5)
    apart = simulate(step, cluster).seconds
    assert apart == pytest.approx(sum(kernel_seconds(cpu, p) + 1e-5 for p in found.parts))
    assert apart > 5 * whole
