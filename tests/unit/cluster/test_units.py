"""Quantities with units."""

from __future__ import annotations

import pytest

from meshwright.compiler.cluster.units import Quantity, amount, flops, parse_quantity, rate, seconds


@pytest.mark.parametrize(
    ("text", "quantity", "expected"),
    [
        ("400 Gb/s", "rate", 50e9),
        ("450 GB/s", "rate", 450e9),
        ("450GBps", "rate", 450e9),
        ("1 GiB/s", "rate", 2.0**30),
        ("3.35 TB/s", "rate", 3.35e12),
        (5, "rate", 5.0),
        ("5 us", "seconds", 5e-6),
        ("5 µs", "seconds", 5e-6),
        ("250 ns", "seconds", 250e-9),
        ("1.5e-3 s", "seconds", 1.5e-3),
        ("80 GiB", "bytes", 80 * 2.0**30),
        ("80 GB", "bytes", 80e9),
        ("1_024 B", "bytes", 1024.0),
        ("989 TFLOP/s", "flops", 989e12),
        ("2 PFLOPS", "flops", 2e15),
    ],
)
def test_a_quantity_is_read_in_base_units(text: object, quantity: Quantity, expected: float) -> None:
    assert parse_quantity(text, quantity) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "quantity"),
    [
        ("450", "rate"),
        ("450 GB", "rate"),
        ("450 gb/s", "rate"),
        ("5 usec", "seconds"),
        ("80 Gb", "bytes"),
        ("80 GiB/s", "bytes"),
        ("fast", "rate"),
        ("", "rate"),
        (True, "rate"),
        (None, "seconds"),
        ("1 TB/s", "flops"),
    ],
)
def test_what_is_no_quantity_is_refused(text: object, quantity: Quantity) -> None:
    with pytest.raises(ValueError):
        parse_quantity(text, quantity)


def test_quantities_are_shown_with_the_unit_that_suits_them() -> None:
    assert [rate(50e9), rate(3.35e12), rate(1.555e12)] == ["50 GB/s", "3.35 TB/s", "1555 GB/s"]
    assert [seconds(0.6e-6), seconds(2.7e-6), seconds(0.5)] == ["600 ns", "2.7 us", "500 ms"]
    assert [flops(989e12), amount(80 << 30), amount(100)] == ["989 TFLOP/s", "80 GiB", "100 B"]
