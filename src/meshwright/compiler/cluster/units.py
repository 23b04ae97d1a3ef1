"""Quantities as people write them: ``"400 Gb/s"``, ``"80 GiB"``, ``"5 us"``, ``"989 TFLOP/s"``, or plain numbers."""

from __future__ import annotations

import re
from typing import Literal

Quantity = Literal["bytes", "rate", "seconds", "flops"]

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{prefix}i": 1024.0 ** (power + 1) for power, prefix in enumerate("KMGTP")}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_PREFIX = r"([KMGTP]i|[kKMGTP])?"
_NUMBER = re.compile(r"\s*([+-]?(?:\d+(?:_\d+)*)(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(\S.*?)?\s*")
EXAMPLES: dict[Quantity, str] = {
    "bytes": '"80 GiB" or "80 GB"',
    "rate": '"50 GB/s" (bytes) or "400 Gb/s" (bits)',
    "seconds": '"5 us"',
    "flops": '"989 TFLOP/s"',
}
BASE: dict[Quantity, str] = {
    "bytes": "bytes",
    "rate": "bytes per second",
    "seconds": "seconds",
    "flops": "FLOP/s",
}  # fmt: skip


def parse_quantity(value: object, quantity: Quantity) -> float:
    """A number in base units (bytes, bytes per second, seconds, FLOP/s).

    Raises ValueError with the reason: no number, no unit in a text, or a unit of something else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, str):
        raise ValueError(f"this is neither a number in {BASE[quantity]} nor a text with a unit")
    found = _NUMBER.fullmatch(value)
    if not found:
        raise ValueError(f"'{value}' is not a number with a unit")
    if found[2] is None:
        raise ValueError(f"'{value}' has no unit")
    factor = _factor(found[2], quantity)
    if factor is None:
        raise ValueError(f"'{found[2]}' is no unit of {BASE[quantity]}")
    return float(found[1].replace("_", "")) * factor


def _factor(unit: str, quantity: Quantity) -> float | None:
    if quantity == "seconds":
        return _SECONDS.get(unit)
    if quantity == "flops":
        found = re.fullmatch(_PREFIX + r"(?:FLOP/s|FLOPS|flops|FLOPs/s)", unit)
        return _scale(found[1]) if found else None
    found = re.fullmatch(_PREFIX + r"(B|b|bit|byte|bytes)" + (r"(?:/s|ps)" if quantity == "rate" else ""), unit)
    if not found or (quantity == "bytes" and found[2] in ("b", "bit")):
        return None
    return _scale(found[1]) / (8 if found[2] in ("b", "bit") else 1)


def _scale(prefix: str | None) -> float:
    return _BINARY[prefix] if prefix in _BINARY else _DECIMAL[prefix or ""]


def rate(value: float) -> str:
    """Bytes per second for people and for files: ``450 GB/s``."""
    return f"{_scaled(value, 'B/s')}"


def seconds(value: float) -> str:
    """``5 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{_short(value / scale)} {unit}"
    return f"{_short(value / 1e-9)} ns"


def flops(value: float) -> str:
    """``989 TFLOP/s``."""
    return _scaled(value, "FLOP/s")


def amount(value: float) -> str:
    """Bytes in binary units, as memory is sold: ``80 GiB``."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if abs(value) >= 1024.0**power and (power < 4 or value >= 10 * 1024.0**power):
            return f"{_short(value / 1024.0**power)} {unit}"
    return f"{int(value)} B"


def _scaled(value: float, unit: str) -> str:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale and not (prefix in "PT" and value < 2 * scale and unit == "B/s"):
            return f"{_short(value / scale)} {prefix}{unit}"
    return f"{_short(value)} {unit}"


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
