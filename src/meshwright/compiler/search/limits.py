"""What a plan must keep to: the memory that is left free and what is pinned; and how far the search goes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from meshwright.compiler.cluster.units import parse_quantity
from meshwright.compiler.diagnostics import error
from meshwright.compiler.search.pins import Pins


@dataclass(frozen=True)
class Limits:
    """What the search keeps to. The largest global batch is the batch that was captured."""

    reserve: int = 0
    """Bytes of each device's memory that stay free, beyond what the device's own reserve takes."""
    pins: Pins = field(default_factory=Pins)
    budget: int = 24
    """How many candidates are compiled and simulated at most."""
    within: float = 0.03
    """Of plans whose times differ by less than this share, the simplest is chosen."""


def token_count(text: str | int) -> int:
    """Reads ``131072``, ``128K``, ``16M``, ``1.5G``: powers of 1,024, as batches are given. Raises MeshwrightError
    E0442."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)i?", text.strip().replace("_", "").replace(",", ""), re.IGNORECASE)
    value = float(found[1]) * 1024 ** " KMG".index(found[2].upper() or " ") if found is not None else 0.5
    if value != int(value):
        message = f"'{text.strip()}' is no number of tokens"
        raise error("E0442", message, action="give a whole number, or one in powers of 1,024: 128K, 16M, 1G")
    return int(value)


def reserve_bytes(text: str | int, memory: int) -> int:
    """Reads ``4GiB``, ``500 MB``, a number of bytes, or ``5%`` of a device's memory. Raises MeshwrightError E0438."""
    if isinstance(text, int):
        return text
    share = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*%\s*", text)
    if share is not None:
        if not 0 <= float(share[1]) < 100:
            message = f"a reserve of {text.strip()} of each device's memory"
            raise error("E0438", message, action="give 0% or more, and less than 100%")
        return int(memory * float(share[1]) / 100)
    try:
        value = float(text) if re.fullmatch(r"\s*-?\d+(\.\d+)?\s*", text) else parse_quantity(text, "bytes")
    except ValueError as fault:
        action = "write 4GiB, a number of bytes, or 5%"
        raise error("E0438", f"the memory reserve: {fault}", action=action) from None
    return int(value)
