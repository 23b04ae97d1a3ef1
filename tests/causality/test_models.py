"""Every model of this folder is judged as it should be: no leak missed, no false leak."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import meshwright
import tests.causality
from tests.causality.case import CASES, Case

for found in pkgutil.iter_modules(tests.causality.__path__):
    if found.name.startswith("family_"):
        importlib.import_module(f"tests.causality.{found.name}")


WITHOUT_WITNESS = {"ZeroGateOfNoModule", "BeyondACosineOfAlmostOne"}
"""A weight that no module holds stays zero in all runs, a threshold is met by none; the analysis alone tells."""


def test_there_are_enough_models() -> None:
    assert len(CASES) >= 100


LONG = (
    "SwitchPerSampleByDispatch",
    "MaskOfCountedPlaces",
    "SolvesATriangleAsAFullMatrix",
    "RectifiedAfterWhatCancels",
    "LongConvolutionByFourier",
    "ZeroGateOfNoModule",
)
"""Models of whose kind there are others that take less long."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.slow if c.name in LONG else ()) for c in CASES.values()],
    ids=lambda c: c.name,
)
def test_verdict(case: Case) -> None:
    torch.manual_seed(0)
    model, batch, options = case.build()
    before = {k: v.clone() for k, v in model.state_dict().items()} if isinstance(model, torch.nn.Module) else {}
    found = meshwright.check(model, batch, **options)
    assert (found.verdict, found.leaks) == (case.verdict, case.leaks), found.text()
    if case.name not in WITHOUT_WITNESS:
        assert {w.kind for w in found.witnesses} == case.leaks, found.text()
    for name, value in before.items():
        assert torch.equal(value, model.state_dict()[name]), name
