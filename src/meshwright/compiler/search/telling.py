"""Numbers and names for people, as the reasons and the tables of a plan write them."""

from __future__ import annotations

from meshwright.compiler.cluster.units import amount
from meshwright.compiler.search.candidate import DATA, REPLICA, TENSOR, Candidate


def seconds(value: float) -> str:
    """``3.21 s``, ``45.6 ms``, ``120 us``."""
    size = abs(value)
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if size >= scale * 0.9995 or unit == "us":
            number = value / scale
            return f"{number:.0f} {unit}" if abs(number) >= 99.95 else f"{number:.3g} {unit}"
    raise AssertionError("the last unit takes all")


def percent(share: float) -> str:
    """``4 %``, ``0.3 %``."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def memory(count: float) -> str:
    """``79.2 GiB``."""
    return amount(round(count)) if abs(count) < 1024**3 else f"{count / 1024**3:.1f} GiB"


def count(number: float) -> str:
    """``8.03 billion``."""
    for word, scale in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {word}"
    return f"{number:,.0f}"


def described(one: Candidate) -> str:
    """What a candidate is, in a few words of the field."""
    data, replica, tensor = one.size(DATA), one.size(REPLICA), one.size(TENSOR)
    level = {1: "ZeRO-1", 2: "ZeRO-2", 3: "full sharding"}.get(one.storage, "")
    words = []
    if one.ranks == 1:
        words.append("one device")
    elif one.storage and replica > 1:
        words.append(f"{level} over {data} ranks, copied {replica} times")
    elif one.storage:
        words.append(f"{level} over {data} ranks")
    elif replica > 1:
        words.append(f"plain data parallelism over {replica} ranks")
    if tensor > 1:
        words.append(f"tensor parallelism over {tensor}" + (" with sequence sharding" if one.sequence else ""))
    if one.pipe > 1:
        each = f" with {one.virtual} stages each" if one.virtual > 1 else ""
        words.append(f"a pipeline over {one.pipe} ranks{each} ({one.schedule})")
    if one.microbatches > 1:
        words.append(f"{one.microbatches} microbatches")
    if one.save != "all":
        every = f" in every {_ordinal(one.every)} block" if one.every > 1 else ""
        every += " where a stage must" if one.by_stage else ""
        words.append(f"{'selective' if one.save == 'matmuls' else 'full'} recomputation{every}")
    if one.offload:
        words.append("the optimizer state on the host")
    if one.whole:
        words.append(f"{' and '.join(one.whole)} uncut")
    return ", ".join(words)


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
