"""The second reading of ranks' programs: what parts of positions see, what messages do, and that it proves no leak."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.compiler.causality.findings import contradictions
from meshwright.compiler.causality.second.knowledge import Knowledge
from meshwright.compiler.causality.second.messages import TOLD
from meshwright.compiler.causality.second.opinion import Opinion
from meshwright.compiler.causality.second.reader import Reader
from meshwright.compiler.causality.second.seen import SAME, Along, Seen, blank
from meshwright.compiler.causality.second.shards import shard_opinion
from meshwright.compiler.causality.verdict import Verdict
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.ops.attention import Form
from meshwright.compiler.graph.pending import Pending
from meshwright.compiler.mesh import Mesh, parse_sharding
from meshwright.compiler.rules.attention import attention
from meshwright.compiler.rules.rule import REGISTRY, OpCall, Rule, TensorType
from meshwright.rank_causality import read_ranks
from meshwright.runtime.rendezvous import Rendezvous
from meshwright.runtime.virtual import VirtualCommunicator
from tests.causality.time_cut import PART, cut_at_random, gathered_keys, whole_program
from tests.equivalence.faults import FAULTS
from tests.parity.harness import Cell, Task, compiled

ROWS, LENGTH = 4, 12


def both(seed: int) -> tuple[Verdict, str]:
    """What both readings say of a random program. None must prove what the other one disproves."""
    program = whole_program()
    cut_at_random(program, random.Random(seed))
    found = read_ranks(program)
    assert found is not None and found.second is not None
    assert found.verdict in (Verdict.CAUSAL, Verdict.LEAK)
    against = {Verdict.LEAK: "CAUSAL", Verdict.CAUSAL: "LEAK"}[found.verdict]
    assert found.second.verdict != against, found.second.headline()
    assert "E0793" not in {finding.code for finding in found.findings}
    return found.verdict, found.second.verdict


def test_of_random_cuts_no_leak_is_proved_causal() -> None:
    assert {both(seed) for seed in (3, 4)} == {(Verdict.CAUSAL, "CAUSAL"), (Verdict.LEAK, "LEAK")}


@pytest.mark.slow
def test_of_many_random_cuts_those_that_are_causal_are_settled() -> None:
    found = Counter(both(seed) for seed in range(5, 105))
    assert found[Verdict.LEAK, "LEAK"] > 10
    assert found[Verdict.CAUSAL, "CAUSAL"] > 40
    assert found[Verdict.CAUSAL, "not shown"] <= 2


def test_it_is_told_beside_the_verdict_of_ranks() -> None:
    found = read_ranks(compiled(Cell(Task("gpt.mw"), "tp=2", 2)))
    assert found is not None
    assert found.footline().splitlines()[0] == (
        "second reading: CAUSAL at length 12: position t sees the first position to t"
    )
    assert found.json()["second"] == {"verdict": "CAUSAL", "span": [None, 0], "reason": "", "lengths": [12]}


def test_what_is_not_settled_names_the_node_and_its_line() -> None:
    (fault,) = (f for f in FAULTS if f.name == "attention without its causal mask")
    program = compiled(fault.cell)
    fault.put(program)
    found = read_ranks(program)
    assert found is not None and found.second is not None
    assert found.second.verdict == "not shown"
    assert found.second.reason.endswith(
        "do not bound what is seen: %attention_default = meshwright.attention, gpt.mw:21"
    )


def test_a_rule_that_forgets_where_parts_begin_contradicts_the_first_reading() -> None:
    def forgetful(call: OpCall) -> Rule:
        return replace(attention(call), relations={**attention(call).relations, "s": "[-inf,0]"})

    program = whole_program()
    gathered_keys(program, lambda write: write.start(PART + 1))
    with patch.dict(REGISTRY, {"meshwright.attention": forgetful}):
        found = read_ranks(program)
    assert found is not None
    assert found.verdict is Verdict.LEAK
    told = next(f for f in found.findings if f.code == "E0793")
    assert told.message.startswith("two readings of causality of the ranks contradict each other: LEAK (future) and CA")


def test_only_a_proof_contradicts_a_leak() -> None:
    assert not contradictions(frozenset({"future"}), Opinion("not shown"))
    assert not contradictions(frozenset(), Opinion("CAUSAL", SAME, "", (12,)))
    assert contradictions(frozenset({"batch"}), Opinion("CAUSAL", SAME, "", (12,)))


MESH = Mesh((("micro", 2), ("data", 2), ("context", 3)))
AT = {"micro": 1, "data": 0, "context": 2}


@pytest.mark.parametrize(
    ("lies", "shape", "time", "row", "verdict"),
    [
        ("[4@micro, 12@context]", (2, 4), {1: (8, 8)}, {0: (2, 2)}, "CAUSAL"),
        ("[4@micro, 12@context]", (2, 4), {1: (-math.inf, 8)}, {0: (2, 2)}, "CAUSAL"),
        ("[4@micro, 12@context]", (2, 4), {1: (-math.inf, 9)}, {0: (2, 2)}, "LEAK"),
        ("[4@micro, 12@context]", (2, 4), {1: (8, 8)}, {0: (0, 2)}, "LEAK"),
        ("[4@micro, 12@context]", (2, 4), {0: (8, 8)}, {0: (2, 2)}, "LEAK"),
        ("[2@micro*2@data, 12]", (12,), {0: (0, 0)}, None, "CAUSAL"),
        ("[4@micro*12]", (2, 12), {1: (0, 0)}, {0: (2, 2)}, "CAUSAL"),
        ("[4@micro*12]", (2, 12), {1: (0, 1)}, {0: (2, 2)}, "LEAK"),
        ("[48]", (48,), {0: (0, 0)}, {}, "not shown"),
    ],
)
def test_a_shard_is_judged_by_its_places_in_the_whole(
    lies: str, shape: tuple[int, ...], time: Any, row: Any, verdict: str
) -> None:
    sharding = parse_sharding(lies)
    dims = tuple((n,) for n in shape)
    if "*12" in lies:
        dims = (shape,)
    if row is None:  # one row, which has no index
        dims, rows = ((), *dims), Along(fixed=(2, 2))
    else:
        rows = Along(row)
    said = shard_opinion(Seen(dims, Along(time), rows), sharding, MESH, AT, ROWS)
    assert said.verdict == verdict, said


def test_of_one_index_the_number_is_kept() -> None:
    assert Along(fixed=(3, 3)).within(None, 3, 1) == (0, 0)
    assert Along(fixed=(3, 3)).within(0, 0, LENGTH) == (3 - 11, 3)
    assert Along({0: (0, 0)}, fixed=(0, 0)).within(0, 0, LENGTH) == (-11, 0)
    assert Along().within(0, 0, LENGTH) is None
    assert bool(Along(fixed=(0, 0)))


def moved(function: Callable[[Tensor], Tensor], start: int = 0) -> Along:
    """What positions see after an op on ``[rows, positions, 8]``."""
    known = Knowledge()
    x = torch.zeros(ROWS, LENGTH, 8)
    made = blank(x.shape)
    known.know(x, replace(made, row=Along({0: SAME}), time=Along({1: (start, start)})))
    with Reader(known):
        return known.seen(function(x)).time


@pytest.mark.parametrize(
    ("function", "spans", "fixed"),
    [
        (lambda x: x[:, 6:], {1: (6, 6)}, None),
        (lambda x: x[:, 5:10], {1: (5, 5)}, None),
        (lambda x: x.chunk(3, 1)[2], {1: (8, 8)}, None),
        (lambda x: x.split([5, 7], 1)[1], {1: (5, 5)}, None),
        (lambda x: torch.cat([x, x], 1), {1: (-12, 0)}, None),
        (lambda x: torch.cat([x[:, :6], x[:, 6:]], 1), {1: (0, 0)}, None),
        (lambda x: torch.cat([x[:, 6:], x[:, :6]], 1), {1: (-6, 6)}, None),
        (lambda x: torch.nn.functional.pad(x, [0, 0, 4, 0]), {1: (-4, -4)}, None),
        (lambda x: torch.nn.functional.pad(x, [0, 0, -4, 4]), {1: (4, 4)}, None),
        (lambda x: x[:, 7:8], {}, (7, 7)),
        (lambda x: x[:, 7], {}, (7, 7)),
        (lambda x: x + x[:, :1], {1: (0, 0)}, (0, 0)),
        (lambda x: x[:, 12:], {}, None),
    ],
)
def test_ops_that_cut_and_join_move_intervals(
    function: Callable[[Tensor], Tensor], spans: dict[int, tuple[float, float]], fixed: tuple[float, float] | None
) -> None:
    assert moved(function) == Along(spans, fixed)
    later = {part: (low + 24, high + 24) for part, (low, high) in spans.items()}
    assert moved(function, 24) == Along(later, None if fixed is None else (fixed[0] + 24, fixed[1] + 24))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("begins", [(0, 0), (6, 0), (0, 6), (5, 7)])
def test_attention_reads_what_its_rule_says_wherever_its_parts_begin(
    causal: bool, window: int, begins: tuple[int, int]
) -> None:
    one = TensorType((2, 2, 6, 4))
    args = (one, one, one, None, None, causal, window, 1.0, 0.0, 0, [2, 2, LENGTH, LENGTH], [0, 0, *begins])
    result = TensorType((2, 2, 6))
    rule = attention(OpCall("meshwright.attention.default", args, {}, (one, one, one), (one, result)))
    word = {"prefix": "[-inf,0]", "suffix": "[0,inf]", "all": "[-inf,inf]"}.get(rule.relations["s"])
    low, high = (float(n) for n in (word or rule.relations["s"]).strip("[]").split(","))
    seen = Form(None, None, *args[5:]).visible(6, 6, torch.device("cpu"))  # type: ignore[arg-type]  # as the op is given them
    queries, keys = (torch.ones(6, 6) if seen is None else seen).nonzero().T
    distances = keys - queries
    assert distances.numel() == 0 or (low <= int(distances.min()) and int(distances.max()) <= high)
    if begins == (6, 0) and causal and not window:
        assert high == 6
    every = range(-5, 6)
    told = {d for d in every if low <= d <= high}
    assert {d for d in every if d in distances.tolist()} == told


def on_all_ranks(mesh: Mesh, function: Callable[[int], Any]) -> list[Any]:
    """What each rank of a mesh makes."""
    meeting, made = Rendezvous(mesh.ranks), dict[int, Any]()

    def body(rank: int) -> None:
        with collectives.use(VirtualCommunicator(rank, mesh, 1, meeting)):
            try:
                made[rank] = function(rank)
            except BaseException as failure:
                meeting.fail(rank, failure)
                raise

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(mesh.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(mesh.ranks)]


X, Y = ("x",), ("x", "y")
MESSAGES: dict[str, tuple[Any, Callable[[list[Tensor]], tuple[Any, ...]]]] = {
    "exchange": (collectives.all_to_all, lambda xs: (xs[0], 0, 1, "x", 12)),
    "exchange, padded": (collectives.all_to_all, lambda xs: (xs[0], 2, 1, "x", 11)),
    "sum and cut": (collectives.reduce_scatter_wide, lambda xs: (xs[0], 1, Y, torch.float64)),
    "several joined": (collectives.all_gather_many, lambda xs: (xs, [1, 0], X, [12, 10])),
    "several summed and cut": (collectives.reduce_scatter_many, lambda xs: (xs, [1, 0], X)),
    "several summed in fp32": (collectives.reduce_scatter_wide_many, lambda xs: (xs, [1, 0], Y, torch.float64)),
    "several summed": (collectives.all_reduce_many, lambda xs: (xs, X, "max")),
    "joined later": (collectives.all_gather_begin, lambda xs: (xs, [1, 0], X, [12, 10])),
    "cut later": (collectives.reduce_scatter_begin, lambda xs: (xs, [1, 0], X)),
    "cut in fp32 later": (collectives.reduce_scatter_wide_begin, lambda xs: (xs, [1, 0], Y, torch.float64)),
    "summed later": (collectives.all_reduce_begin, lambda xs: (xs, Y, "sum", True)),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_told_by_what_computes_the_same(name: str) -> None:
    message, arguments = MESSAGES[name]
    mesh = Mesh((("x", 3), ("y", 2)))

    def both(rank: int) -> list[list[Tensor]]:
        found = []
        for function in (message, TOLD[message]):
            xs = [torch.arange(6 * 4 * 5).reshape(6, 4, 5).double() * (rank + 1), torch.arange(12.0).double() + rank]
            xs[1] = xs[1].reshape(4, 3)
            made = function(*arguments(xs))
            made = collectives.wait(made) if isinstance(made, Pending) else made
            found.append(list(made) if isinstance(made, list) else [made])
        return found

    for one, other in on_all_ranks(mesh, both):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b)


def test_every_message_of_several_parts_is_told() -> None:
    assert set(collectives.BEGINS) <= set(TOLD)
    assert {message for message, _ in MESSAGES.values()} == set(TOLD)
