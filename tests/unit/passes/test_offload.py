"""What of an update moves to the host, and what its graph says about it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx

from meshwright.compiler.analysis.inplace import in_place
from meshwright.compiler.analysis.offloading import TO_DEVICE, TO_HOST, on_host
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.graph.text import print_graph
from meshwright.compiler.graph.text_parser import parse_local_graph
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.offload import LEAST
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.summary import Transfer
from meshwright.frontend.capture import capture
from tests.unit.passes.stack import batch, model


def adamw_step(width: int = 32) -> StepProgram:
    made = model(2, width)
    return capture(made, batch(), torch.optim.AdamW(made.parameters(), lr=0.1), clip=1.0)


@pytest.fixture(scope="module")
def program() -> StepProgram:
    return adamw_step()


@pytest.fixture(scope="module")
def plain(program: StepProgram) -> RankProgram:
    return compile_step(program, preset("fsdp=2", program, 2))


@pytest.fixture(scope="module")
def offloaded(program: StepProgram) -> RankProgram:
    return compile_step(program, preset("fsdp=2,offload", program, 2))


def sizes(rank_program: RankProgram) -> dict[str, int]:
    """The bytes of every state tensor on a rank."""
    specs = rank_program.program.state
    local = {n: s.local_shape(rank_program.mesh) for n, s in rank_program.state.items()}
    return {n: torch.Size(shape).numel() * specs[n].dtype.itemsize for n, shape in local.items()}


def test_large_state_is_on_the_host_and_small_state_is_not(offloaded: RankProgram) -> None:
    found = on_host(offloaded.update)
    assert found == {n for n, size in sizes(offloaded).items() if size >= LEAST}
    assert found and not any(name.endswith("/step") for name in found)


def test_the_plain_program_has_everything_on_the_device(plain: RankProgram) -> None:
    assert not on_host(plain.update)


def test_each_tensor_goes_there_and_back_once(offloaded: RankProgram) -> None:
    graph = offloaded.update.module.graph
    targets = Counter(n.target for n in graph.nodes)
    assert targets[TO_DEVICE] == targets[TO_HOST] == len(on_host(offloaded.update))
    for node in graph.nodes:
        if node.target is TO_HOST:
            store, _ = node.args
            assert isinstance(store, fx.Node) and store.op == "placeholder"
            assert {u.target for u in store.users} == {TO_DEVICE, TO_HOST}


def test_the_state_of_one_parameter_is_on_the_device_at_a_time(offloaded: RankProgram) -> None:
    """In the order in which the update runs, everything brought is returned before the next parameter's is brought."""
    inputs = offloaded.update.module.graph.find_nodes(op="placeholder")
    names = dict(zip(inputs, offloaded.update.signature.inputs, strict=True))
    there: set[str] = set()
    for node in in_place(offloaded.update).order:
        if node.target in (TO_DEVICE, TO_HOST):
            store = node.args[0]
            assert isinstance(store, fx.Node)
            value = names[store]
            owner = value.name.partition("/")[0]
            if node.target is TO_DEVICE:
                assert there <= {owner}
                there.add(owner)
            elif value.name.endswith("/exp_avg_sq"):
                there.discard(owner)
    assert not there


def test_nothing_is_copied_but_what_must_be(plain: RankProgram, offloaded: RankProgram) -> None:
    """The new state is computed where the brought one is, and written to the host; no other copy is made of it."""
    assert not in_place(offloaded.update).kept
    before = sum(map(len, in_place(plain.update).written_back.values()))
    assert sum(map(len, in_place(offloaded.update).written_back.values())) <= before


def test_the_text_keeps_it(offloaded: RankProgram) -> None:
    text = print_graph(offloaded.update, "update")
    assert "meshwright.to_device.default" in text and "meshwright.to_host.default" in text
    name, back = parse_local_graph(text)
    assert print_graph(back, name) == text
    assert on_host(back) == on_host(offloaded.update)


def test_the_summary_tells_the_transfers(plain: RankProgram, offloaded: RankProgram) -> None:
    found = summarize(offloaded)
    moved = sum(sizes(offloaded)[n] for n in on_host(offloaded.update))
    transfers: Counter[str] = Counter()
    for item in found.update.items:
        if isinstance(item.work, Transfer):
            transfers[item.work.direction] += item.work.bytes
    assert transfers == {"to device": moved, "to host": moved}
    before = summarize(plain).held["optimizer state"]
    assert found.held["optimizer state"] == before - moved


def test_an_optimizer_with_little_state_stays_as_it_is() -> None:
    program = adamw_step(width=4)
    found = compile_step(program, preset("fsdp=2,offload", program, 2))
    assert not on_host(found.update)
