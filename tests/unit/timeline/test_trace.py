"""The timeline: everything that takes time is on it, on its resource, and memory is counted as the prediction says."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.summary import Buffer
from meshwright.compiler.timeline import simulate, write_trace
from tests.unit.timeline.steps import CLUSTER, gather, graph, kernel, step
from tests.unit.timeline.test_repeats import deep


def test_every_copy_of_a_block_is_on_the_timeline() -> None:
    summary = step(deep(2, ahead=1), repeats={"layers.1": 5})
    found, plain = simulate(summary, CLUSTER, spans=True), simulate(summary, CLUSTER)
    assert found.seconds == pytest.approx(plain.seconds, rel=1e-12)
    for resource, total in (("compute", plain.compute), ("waiting", None)):
        busy = sum(s.end - s.start for s in found.spans if s.resource == resource)
        if total is not None:
            assert busy == pytest.approx(sum(total.values()))
    sent = sum(s.end - s.start for s in found.spans if s.resource in ("fast", "slow"))
    assert sent == pytest.approx(sum(plain.communication.values()))
    copies = [s.notes["copy"] for s in found.spans if s.resource == "compute" and s.block == "layers.1"]
    assert copies[::2][:5] == [f"{n} of 5" for n in range(1, 6)]


def test_on_every_resource_one_thing_happens_at_a_time() -> None:
    found = simulate(step(deep(2, ahead=1), repeats={"layers.1": 5}, microbatches=2), CLUSTER, spans=True)
    for resource in ("compute", "fast", "slow"):
        spans = sorted((s.start, s.end) for s in found.spans if s.resource == resource)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("microbatches", [1, 3, 4, 9])
def test_of_many_microbatches_the_first_two_and_the_last_are_shown(microbatches: int) -> None:
    summary = step(graph(kernel(1e-3)), microbatches=microbatches)
    found = simulate(summary, CLUSTER, spans=True)
    shown = [s.notes["microbatch"] for s in found.spans if s.resource == "step" and s.name == "micro"]
    hidden = [s.name for s in found.spans if "like the one before" in s.name]
    if microbatches <= 3:
        assert shown == [f"{n} of {microbatches}" for n in range(1, microbatches + 1)]
        assert not hidden
    else:
        assert shown == [f"{n} of {microbatches}" for n in (1, 2, microbatches)]
        assert hidden == [f"{microbatches - 3} microbatches like the one before"]
    assert found.seconds == pytest.approx(simulate(summary, CLUSTER).seconds)


def test_the_memory_counter_follows_the_buffers(tmp_path: Path) -> None:
    buffers = (
        Buffer(100, "activations", 0, 2, "forward", ""),
        Buffer(50, "temporaries", 1, 1, "forward", ""),
        Buffer(10, "batch", -1, 3, "forward", ""),
    )
    micro = replace(graph(*[kernel(1e-3)] * 3), buffers=buffers)
    found = simulate(replace(step(micro), held={"parameters": 7}), CLUSTER, spans=True)
    totals = [sum(map(int, s.notes.values())) for s in found.spans if s.resource == "memory"]
    assert max(totals) == 167 == found.memory.peak
    path = tmp_path / "trace.json"
    write_trace(found, path)
    events = json.loads(path.read_text())["traceEvents"]
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == 167


def test_the_file_names_resources_and_sizes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(simulate(step(graph(kernel(1e-3), gather(1e-3))), CLUSTER, spans=True), path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"step", "compute", "slow"}
    (message,) = [e for e in events if e["ph"] == "X" and names[e["tid"]] == "slow"]
    assert message["args"]["axes"] == "data"
    assert message["args"]["kind"] == "all-gather"
    assert message["dur"] == pytest.approx(1e3, rel=1e-3)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError) as told:
        write_trace(simulate(step(graph(kernel(1e-3))), CLUSTER, spans=True), tmp_path / "none" / "trace.json")
    assert told.value.diagnostics[0].code == "E0473"
