"""What a witness says is so: a plain forward pass on its two batches shows the difference at the position told."""

from __future__ import annotations

import json

import pytest
import torch

import meshwright
from meshwright.checking import Checked
from tests.causality import family_attention, family_experts, family_packed
from tests.causality.case import CASES

ROUTERS = (
    "SecondChoicesQueueBehind",
    "SecondChoicesQueueBehindWithRoom",
    "ExpertChoiceOverAll",
    "ExpertChoicePerSample",
    "DropsByScore",
    "DropsInSortedOrder",
    "DepthsByTopK",
    "SwitchBatchMajor",
)
assert family_experts and family_packed and family_attention


def _checked(name: str) -> tuple[torch.nn.Module, Checked]:
    model, batch, options = CASES[name].build()
    return model, meshwright.check(model, batch, **options)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_plain_forward_pass_shows_the_leak(name: str) -> None:
    model, found = _checked(name)
    assert found.leaks == CASES[name].leaks
    for witness in found.witnesses:
        assert witness.own_weights
        a, b = witness.batch_a, witness.batch_b
        row, time = witness.output
        changed = (a != b).nonzero().tolist()
        assert list(witness.input) in changed
        if witness.kind == "future":
            assert {r for r, _ in changed} == {row} and min(t for _, t in changed) > time
        else:
            assert row not in {r for r, _ in changed}
        with torch.no_grad():
            difference = (model(a)[row, time] - model(b)[row, time]).abs().max()
        assert difference > 1e-5, witness.text()
        assert witness.difference > 1e-7


def test_a_document_is_not_seen_by_another() -> None:
    model, found = _checked("CausalMaskOnly")
    (witness,) = found.witnesses
    row, time = witness.output
    assert witness.input[0] == row
    assert witness.segments[row, time] != witness.segments[witness.input]
    with torch.no_grad():
        difference = (model(**witness.batch_a) - model(**witness.batch_b))[row, time].abs().max()
    assert difference > 1e-6


def test_the_place_is_the_line_where_positions_are_joined() -> None:
    _, found = _checked("NoMask")
    (witness,) = found.witnesses
    assert witness.op == "aten._softmax.default"
    assert witness.place is not None
    assert witness.place.file.endswith("case.py")
    assert "softmax(-1)" in witness.place.text


def test_reports_hold_what_was_found() -> None:
    _, found = _checked("NoMask")
    data = json.loads(json.dumps(found.json()))
    assert data["verdict"] == "LEAK" and data["leaks"] == ["future"]
    assert data["witnesses"][0]["output"] == list(found.witnesses[0].output)
    log = json.loads(json.dumps(found.sarif()))
    (result,) = log["runs"][0]["results"]
    assert result["ruleId"] == "E0711" and result["level"] == "error"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"].endswith("case.py") and place["region"]["startLine"] > 1
    assert found.text().startswith("LEAK (future)")


def test_a_model_that_raises_is_unknown() -> None:
    def broken(ids: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such luck")

    found = meshwright.check(broken, torch.zeros(2, 8, dtype=torch.int64))
    assert found.verdict == "UNKNOWN" and not found.passed
    assert "no such luck" in found.causality.reason


def test_inputs_that_do_not_fit_are_unknown() -> None:
    found = meshwright.check(lambda x: x, torch.zeros(3))
    assert found.verdict == "UNKNOWN"
    found = meshwright.check(lambda ids: ids, torch.zeros(2, 8, dtype=torch.int64), segments="doc")
    assert "no input 'doc'" in found.causality.reason


def test_a_model_is_left_as_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4))
    before = {name: (value, value.data_ptr(), value.clone()) for name, value in model.named_parameters()}

    def closure(ids: torch.Tensor) -> torch.Tensor:
        return model(ids)

    chance = torch.get_rng_state()
    assert meshwright.check(closure, torch.zeros(2, 8, dtype=torch.int64)).verdict == "CAUSAL"
    assert torch.equal(chance, torch.get_rng_state()) and torch.get_default_dtype() == torch.float32
    for name, value in model.named_parameters():
        same, address, copy = before[name]
        assert value is same and value.data_ptr() == address and torch.equal(value, copy)
        assert value.dtype == torch.float32


class WithDropout(torch.nn.Module):
    """Each position but sees the next one, after a layer that draws by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = torch.nn.Embedding(40, 8), torch.nn.Dropout(0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(ids))
        scores = x @ x.transpose(1, 2)
        ahead = torch.ones(ids.shape[1], ids.shape[1]).tril(1) == 0
        weights = self.drop(scores.masked_fill(ahead, -torch.inf).softmax(-1))
        return self.drop(weights @ x)


def test_what_dropout_leaves_unwritten_is_not_where_a_leak_enters() -> None:
    torch.manual_seed(0)
    model = WithDropout().train()
    for seed in range(3):
        ids = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(seed))
        (witness,) = meshwright.check(model, ids).witnesses
        assert witness.place is not None and "softmax" in (witness.place.text or ""), witness.text()
