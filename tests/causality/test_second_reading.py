"""The second reading proves what it can at two lengths, and never what is not so."""

from __future__ import annotations

import importlib
import math
import pkgutil

import pytest
import torch
from torch import Tensor, nn

import meshwright
import tests.causality
from meshwright.compiler.causality.clock import Clock
from meshwright.compiler.causality.feed import read_feed
from meshwright.compiler.causality.resizing import resized
from meshwright.compiler.causality.running import subject_of
from meshwright.compiler.causality.second.opinion import Opinion, second_reading
from tests.causality.architectures import ARCHITECTURES
from tests.causality.case import CASES, Case

for found in pkgutil.iter_modules(tests.causality.__path__):
    if found.name.startswith("family_"):
        importlib.import_module(f"tests.causality.{found.name}")


def opinion_of(model: object, batch: object, **options: object) -> Opinion:
    """What the second reading alone says."""
    torch.manual_seed(0)
    feed = read_feed(model, batch, options.get("batch_dim", 0), options.get("time_dim", 1), options.get("segments"))  # type: ignore[arg-type]  # as the cases give them
    subject = subject_of(model)  # type: ignore[arg-type]  # modules and functions
    with subject.restored(), torch.random.fork_rng(devices=[]):
        subject.draw(1.0, 1.0, 7)
        subject.place(wide=False)
        feeds = []
        for length in (11, 53, 13, 12, 16):
            try:
                feeds.append(resized(feed, feed.rows, length, {}, seed=length))
            except Exception:  # a size that its masks have not
                continue
        return second_reading(subject.function, feeds, subject.addresses(), Clock())


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.slow if place % 3 else ()) for place, c in enumerate(CASES.values())],
    ids=lambda c: c.name,
)
def test_nothing_is_proved_that_is_not_so(case: Case) -> None:
    model, batch, options = case.build()
    said = opinion_of(model, batch, **options)
    if case.leaks:
        assert said.verdict != "CAUSAL", said.headline()
    else:
        assert said.verdict != "LEAK", said.headline()


SETTLED = {
    "ByTril": (-math.inf, 0),
    "ByArangeAndWhere": (-math.inf, 0),
    "ByAttentionFlag": (-math.inf, 0),
    "SlidingWindow": None,
    "CausalConvolution": None,
    "DilatedStack": None,
    "TokenShift": (-1, 0),
    "CumulativeMean": (-math.inf, 0),
    "TokenChoiceTopTwo": (0, 0),
    "WithRotaryTables": (-math.inf, 0),
}


@pytest.mark.parametrize("name", SETTLED)
def test_what_is_settled(name: str) -> None:
    model, batch, options = CASES[name].build()
    said = opinion_of(model, batch, **options)
    assert said.verdict == "CAUSAL", said.headline()
    assert said.span is not None
    if (span := SETTLED[name]) is not None:
        assert said.span == span
    else:
        assert -math.inf < said.span[0] < said.span[1] == 0


@pytest.mark.slow
def test_a_large_part_is_settled() -> None:
    """The share that the page of the checker tells."""
    settled = 0
    for case in CASES.values():
        if not case.leaks and case.verdict == "CAUSAL":
            model, batch, options = case.build()
            settled += opinion_of(model, batch, **options).verdict == "CAUSAL"
    assert settled >= 54


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_families_are_settled(name: str) -> None:
    one = ARCHITECTURES[name]
    assert opinion_of(one.build(), one.batch()).verdict == "CAUSAL"


class Shifted(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.embed = nn.Embedding(40, 8)
        self.qkv = nn.Linear(8, 24)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        t = torch.arange(ids.shape[1])
        near = (t[:, None] >= t[None]) & (t[:, None] - t[None] < self.window)
        scores = (q @ k.transpose(1, 2)).masked_fill(~near, float("-inf"))
        mixed: Tensor = scores.softmax(-1) @ v
        return mixed


def test_windows_are_read_symbolically() -> None:
    said = opinion_of(Shifted(4), torch.randint(40, (2, 16)))
    assert (said.verdict, said.span) == ("CAUSAL", (-3, 0))
    assert said.headline() == "CAUSAL at lengths 11 and 53: position t sees t-3 to t"


def test_it_is_told_beside_the_verdict() -> None:
    found = meshwright.check(Shifted(4), torch.randint(40, (2, 16)), seconds=2.0)
    assert found.footline().splitlines()[-1] == "second reading: CAUSAL at lengths 11 and 53: position t sees t-3 to t"
    assert found.json()["second"] == {"verdict": "CAUSAL", "span": [-3, 0], "reason": "", "lengths": [11, 53]}
    assert not found.findings


def test_writes_by_way_of_other_views_stop_it() -> None:
    def function(x: Tensor) -> Tensor:
        made = x * 1.0
        first = made[:, :1]
        made.copy_(x.flip(1))
        return first.expand_as(x) + made

    assert opinion_of(function, torch.randn(2, 16, 4)).verdict != "CAUSAL"


def test_memory_that_is_read_otherwise_stops_it() -> None:
    def function(x: Tensor) -> Tensor:
        made = x * 1.0
        return made + made.data.flip(1) + torch.from_numpy(made.numpy()).flip(1)

    assert opinion_of(function, torch.randn(2, 16, 4)).verdict != "CAUSAL"


def test_numbers_that_are_read_stop_it() -> None:
    def function(x: Tensor) -> Tensor:
        return x + torch.tensor(x.tolist()).flip(1)

    assert opinion_of(function, torch.randn(2, 16, 4)).verdict != "CAUSAL"


def test_one_length_alone_is_said() -> None:
    table = torch.randn(16, 4)
    said = opinion_of(lambda x: x + table, torch.randn(2, 16, 4))
    assert (said.verdict, said.lengths) == ("CAUSAL", (16,))
    assert said.headline() == "CAUSAL at length 16: position t sees t to t"


def test_a_bound_that_is_not_narrow_enough_does_not_read_like_a_leak() -> None:
    told = Opinion("not shown", (-math.inf, math.inf)).headline()
    assert told.startswith("not settled, which says nothing against the verdict (") and "may see" not in told
    assert Opinion("not shown", (0, 0), "rows are joined").headline().endswith("(rows are joined)")
