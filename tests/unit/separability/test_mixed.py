"""Couplings of one step with different meanings: each has its own, or the plan is refused; never other numbers.

The truth is eager PyTorch of the model whose groups are written out, for each coupling its own number of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.diagnostics import MeshwrightError, Origin
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Declaration, Meaning, Plan
from meshwright.runtime.materialize import from_module
from meshwright.verification import verify
from tests.field.against_one_device import Case, cluster_of, eager, train
from tests.unit.separability.mixed import MODELS, Beside, Multiplied, OneSum, Two, Within, case, declared
from tests.unit.separability.models import Coupled, coupled

PLANS: list[tuple[str, int, Meaning, Meaning, tuple[int, int]]] = [
    ("ddp=2,micro=2", 2, "global", "per microbatch", (1, 2)),
    ("ddp=2,micro=2", 2, "per microbatch", "global", (2, 1)),
    ("fsdp=2,micro=2,prefetch", 2, "global", "per data rank", (1, 4)),
    ("fsdp=4", 4, "per data rank", "global", (4, 1)),
    ("ddp=1,micro=4", 1, "per microbatch", "global", (4, 1)),
]
TAKEN = {Within: 5, Beside: 5, OneSum: 1, Multiplied: 2, Coupled: 5}
"""How many of the plans are taken; in the others what is global and what is not are made of each other."""


def planned(one: Case, text: str, ranks: int, entries: tuple[Declaration, ...]) -> Plan:
    return replace(preset(text, one.program, ranks), separability=entries)


@pytest.mark.parametrize("model", [*MODELS, Coupled])
def test_each_has_its_own_meaning_or_the_plan_is_refused(model: type[Two] | type[Coupled]) -> None:
    made = coupled if model is Coupled else lambda *groups: case(model, *groups)
    one, taken, apart = made(), 0, 0
    plain = eager(one)
    for text, ranks, first, second, groups in PLANS:
        truth = eager(made(*groups))
        try:
            cluster = cluster_of(one, planned(one, text, ranks, declared(model, first, second)))
        except MeshwrightError as fault:
            (found,) = fault.diagnostics
            assert found.code == "E0767" and isinstance(found.place, Origin) and len(found.notes) == 2
            assert all(note.count(":") >= 2 for note in found.notes), "each names its line"
            continue
        assert train(cluster, one).far_from(truth) < 1e-10
        taken, apart = taken + 1, apart + (truth.far_from(plain) > 1e-3)
    assert taken == TAKEN[model]
    assert apart >= taken - 2, "meanings that could not be told from each other would show nothing"


@pytest.mark.parametrize("plan", PLANS[:3])
def test_verification_compares_with_what_is_declared(
    plan: tuple[str, int, Meaning, Meaning, tuple[int, int]],
) -> None:
    text, ranks, first, second, _ = plan
    one = coupled()
    compiled = compile_plan(one.program, planned(one, text, ranks, declared(Coupled, first, second)))
    found = verify(compiled, from_module(one.model), one.batches.__getitem__, lambda step: {})
    assert found.passed and found.worst < 1e-11


def test_what_nothing_is_declared_of_is_global_over_ranks() -> None:
    one = coupled()
    some = tuple(d for d in declared(Coupled, "global", "per data rank") if d.meaning != "global")
    assert train(cluster_of(one, planned(one, "ddp=4", 4, some)), one).far_from(eager(coupled(1, 4))) < 1e-10
    with pytest.raises(MeshwrightError) as caught:
        cluster_of(one, planned(one, "ddp=2,micro=2", 2, some))
    assert caught.value.diagnostics[0].code == "E0305"
