"""What couples samples is found at the user's line, told by its kind, and nothing else is."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from meshwright.compiler.diagnostics import Diagnostic, Origin
from meshwright.compiler.passes import separability
from meshwright.compiler.plan import Declaration
from tests.field.test_batch_norm import Classifier, classifier
from tests.field.test_N15_contrastive_loss import TwoTowers
from tests.field.test_N15_contrastive_loss import case as contrastive
from tests.unit.separability.models import Capacity, Coupled, RootOfMean, Separable, case, coupled

EXPECTED = [("E0760", "variance"), ("E0760", "z"), ("E0761", "balance"), ("E0761", "spread")]
"""The variance is the first to read the mean, the normalised activations the first to read the variance."""


def lines(found: tuple[Diagnostic, ...], model: type[nn.Module]) -> list[tuple[str, str]]:
    """The code of each finding and its line, which is one of the model's."""
    source, first = inspect.getsourcelines(model.forward)
    told = []
    for one in found:
        assert isinstance(one.place, Origin)
        assert one.place.text == source[one.place.line - first].strip()
        told.append((one.code, one.place.text.partition(" = ")[0]))
    return told


def test_every_kind_at_its_line() -> None:
    assert lines(separability.findings(coupled().program), Coupled) == EXPECTED


def test_batch_norm_tells_what_it_feeds_and_what_to_write() -> None:
    (found,) = separability.findings(classifier().program)
    assert lines((found,), Classifier) == [("E0760", "y")]
    assert "it goes into the loss and the buffer 'norm.running_var'" in found.notes
    assert isinstance(found.place, Origin)
    assert f'{{"test_batch_norm.py:{found.place.line}": "global"}}' in found.action


def test_contrastive_losses() -> None:
    found = separability.findings(contrastive(8).program)
    assert {code for code, _ in lines(found, TwoTowers)} == {"E0762"}
    assert ("E0762", "logits") in lines(found, TwoTowers)


@pytest.mark.parametrize(
    ("model", "code", "line"), [(Capacity, "E0763", "place"), (RootOfMean, "E0764", "return self.layer(x)")]
)
def test_other_kinds(model: type[nn.Module], code: str, line: str) -> None:
    found = lines(separability.findings(case(model()).program), model)
    assert found[0][0] == code and found[0][1].startswith(line)


def test_a_sum_over_samples_by_a_count_of_the_batch_couples_nothing() -> None:
    assert separability.findings(case(Separable()).program) == ()


@pytest.mark.parametrize("pattern", ["norm", "**", "test_batch_norm.py:*", "batch statistic", "n*m"])
def test_what_is_declared_is_no_finding(pattern: str) -> None:
    assert separability.findings(classifier().program, (Declaration(pattern, "global"),)) == ()


@pytest.mark.parametrize("pattern", ["first", "test_batch_norm.py:1", "balance loss"])
def test_what_is_declared_of_something_else_is(pattern: str) -> None:
    assert len(separability.findings(classifier().program, (Declaration(pattern, "global"),))) == 1
