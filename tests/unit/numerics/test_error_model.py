"""The formulas against sums that are taken: within a factor of 2 for 2 to 1024 addends."""

from __future__ import annotations

import pytest
import torch

from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.numerics.error_model import (
    LARGEST,
    UNIT,
    Addends,
    Order,
    bias,
    error_of_sum,
    one_rounding,
    stops_growing,
)
from tests.parallel.measured_sums import ORDERS, simulated

COUNTS = (2, 3, 4, 8, 24, 64, 80, 128, 256, 512, 1024)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("addends", ["random signs", "coherent"])
@pytest.mark.parametrize("order", ORDERS)
def test_predicted_within_a_factor_of_two(order: Order, addends: Addends, dtype: torch.dtype) -> None:
    for count in COUNTS:
        measured = simulated(count, addends, order, dtype, width=1024)
        predicted = error_of_sum(short_name(dtype), count, addends, order)
        assert measured / 2 < predicted < 2 * measured, count


def test_units_are_those_of_torch() -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)):
        assert UNIT[name] == torch.finfo(dtype).eps / 2
        assert LARGEST[name] == torch.finfo(dtype).max


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_ones_stop_where_it_says(name: str, dtype: torch.dtype) -> None:
    total = torch.zeros((), dtype=dtype)
    for _ in range(10_000):
        total += 1
    assert total.item() == stops_growing(name)
    # not the one whose addend lies at the lower end, but the mean of all
    assert error_of_sum(name, 10_000, "coherent") == pytest.approx(1 - total.item() / 10_000, abs=0.1)


def test_one_rounding_is_measured() -> None:
    torch.manual_seed(0)
    x = torch.randn(200_000, dtype=torch.float64)
    error = ((x.bfloat16().double() - x).square().sum() / x.square().sum()).sqrt().item()
    assert error == pytest.approx(one_rounding("bf16"), rel=0.1)


def test_few_addends_are_not_biased() -> None:
    assert bias("bf16", 64) == 0 < bias("bf16", 65)
    assert error_of_sum("bf16", 1) == 0
