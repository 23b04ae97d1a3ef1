"""The policy ``numerics``: in a plan file, a preset, a pin; what it costs by the simulator."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from meshwright.compiler.analysis.messages import sending
from meshwright.compiler.cluster.presets import preset as cluster_preset
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.graph import collectives
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.known_graphs import KnownGraphs
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Plan, Precision
from meshwright.compiler.plan_file import plan_to_toml, read_plan
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.summary import Kernel, Message
from meshwright.prediction_of import predict
from tests.unit.numerics.cases import CASES, SENT
from tests.unit.numerics.known_sums import compiled

PLAN = Plan(Mesh((("data", 2),)))


def test_a_plan_says_it_and_one_that_does_not_warns() -> None:
    for policy in ("safe", "warn", "as-written"):
        plan = replace(PLAN, numerics=policy)  # type: ignore[arg-type]  # one of the three
        assert read_plan(plan_to_toml(plan)) == plan
    assert "numerics" not in plan_to_toml(PLAN)
    assert read_plan('batch = ["data"]\n\n[mesh]\ndata = 2\n').numerics == "warn"
    with pytest.raises(MeshwrightError, match="E0338"):
        read_plan('numerics = "careful"\n\n[mesh]\ndata = 2\n')


def test_a_preset_and_a_pin_say_it() -> None:
    program = CASES["E0720"].program()
    made = preset("ddp=4,numerics=safe,micro=2", program)
    assert (made.numerics, made.microbatches, made.name) == ("safe", 2, "ddp=4,micro=2,numerics=safe")
    assert preset("ddp=4", program).numerics == "warn"
    with pytest.raises(MeshwrightError, match="did you mean 'safe'"):
        preset("ddp=4,numerics=save", program)
    with pytest.raises(MeshwrightError, match="write numerics=safe"):
        preset("ddp=4,numerics", program)
    assert parse_pins(["numerics=as-written"]).numerics == "as-written"
    with pytest.raises(MeshwrightError, match="E0431"):
        parse_pins(["numerics=never"])


def test_a_warning_is_given_once_for_the_worst_and_only_by_the_policy_that_warns() -> None:
    with pytest.warns(UserWarning, match="W0720") as told:
        CASES["E0732"].compiled("warn")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in ("safe", "as-written"):
            CASES["E0732"].compiled(policy)  # type: ignore[arg-type]  # two of the three
        CASES["E0720"].compiled("warn")  # four ranks: less than four roundings


def test_gradients_are_added_up_in_fp32_where_it_is_safe() -> None:
    half = replace(PLAN, precision=Precision("bf16", "fp32", "bf16"))
    assert half.accumulate == "bf16"
    assert replace(half, numerics="safe").accumulate == "fp32"
    assert replace(PLAN, numerics="safe").accumulate == "fp32"


def test_known_graphs_of_policies_are_kept_apart() -> None:
    program = CASES["E0720"].program()
    known = KnownGraphs()
    made = {}
    for policy in ("as-written", "safe", "warn"):
        plan = replace(preset("ddp=4", program, None, SENT), numerics=policy)
        made[policy] = compile_step(program, plan, known=known)
    assert made["as-written"].update is made["warn"].update
    assert made["as-written"].update is not made["safe"].update


def wide_node(axes: tuple[tuple[str, int], ...], rows: int) -> tuple[torch.fx.Node, Mesh]:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(rows, 8, dtype=torch.bfloat16, device="meta")
    names = tuple(name for name, _ in axes)
    return graph.call_function(collectives.reduce_scatter_wide, (x, 0, names, torch.float32)), Mesh(axes)


@pytest.mark.parametrize("axes", [(("data", 4),), (("data", 2), ("tensor", 4))])
@pytest.mark.parametrize("rows", [64, 61])
def test_a_wide_sum_is_priced_as_it_is_sent(axes: tuple[tuple[str, int], ...], rows: int) -> None:
    """An all-to-all of the bytes of a reduce-scatter in half precision, and one pass over what has come."""
    node, mesh = wide_node(axes, rows)
    made = sending(node, mesh)
    (message,) = [w for w in made.works if isinstance(w, Message)]
    assert (message.kind, message.dtype, message.payload) == ("all-to-all", "bf16", 64 * 8 * 2)
    total = [w for w in made.works if isinstance(w, Kernel)][-1]
    assert (total.op, total.read, total.written) == ("sum", 64 * 8 * 2, 64 * 8 * 4 // mesh.ranks)
    assert made.pieces == [64 * 8 * 4 // mesh.ranks]


def test_the_simulator_prices_the_rewritten_program() -> None:
    """Within a node the bytes stay those of half precision; between nodes fp32 is sent, where that is cheaper."""
    for ranks in (8, 16):
        cluster = cluster_preset(f"h100x{ranks}")
        assert cluster is not None
        seconds = {}
        for name, policy in (("half", "as-written"), ("safe", "safe")):
            _, program = compiled(f"zero2={ranks},prefetch", 2**22, ranks, policy)  # type: ignore[arg-type]  # a policy
            seconds[name] = predict(program.program, program.plan, cluster).communication["data"]
        if ranks == 8:
            assert seconds["safe"] < 1.1 * seconds["half"]
        else:
            assert 1.1 * seconds["half"] < seconds["safe"] < 2 * seconds["half"]
