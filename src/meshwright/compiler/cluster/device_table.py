"""Reads a device and the tiers of links between devices from tables of a TOML document."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from meshwright.compiler.cluster.cluster import MOST_GROWTH, Collective, Tier
from meshwright.compiler.cluster.device import Device, Efficiency
from meshwright.compiler.cluster.reading import Reading, Table
from meshwright.compiler.cluster.units import Quantity
from meshwright.compiler.toml_text import Path

DTYPES = ("f64", "f32", "tf32", "bf16", "f16", "f8")
"""The short names of dtypes whose rates a device may give; a product of ``f32`` runs as ``tf32`` only when asked."""
DEVICE_KEYS = (
    "name", "description", "aliases", "memory", "bandwidth", "host_link", "flops", "efficiency", "tier", "sources",
)  # fmt: skip
TIER_KEYS = (
    "name", "size", "bandwidth", "latency", "efficiency", "oversubscription", "overhead", "ramp", "floor",
    "in_switch", "direct", "collectives",
)  # fmt: skip
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
_UNITS: dict[str, Quantity] = {"launch": "seconds", "reserve": "bytes"}


def read_device(table: Table, name: str) -> Device:
    """A device from its table (that of a catalogue file, or ``[device]`` of a cluster file)."""
    reading = table.reading
    flops = _section(table, "flops", DTYPES)
    if flops is not None and not flops.values:
        reading.fault(
            "E0414", f"{table.what} has no rates", reading.toml.key(*table.path, "flops"), 'add bf16 = "312 TFLOP/s"'
        )
    rates = {key: flops.quantity(key, "flops") for key in DTYPES if flops.has(key)} if flops else {}
    sources = table.values.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
        table.wrong("sources", "a table of texts", "a table [sources]", write=False)
        sources = {}
    return Device(
        name=name,
        flops=rates,
        memory=int(table.quantity("memory", "bytes")),
        bandwidth=table.quantity("bandwidth", "rate"),
        host_link=table.quantity("host_link", "rate", 16e9),
        efficiency=_efficiency(table),
        sources=sources,
    )


def _section(table: Table, key: str, known: tuple[str, ...]) -> Table | None:
    """The table ``key`` within a table; a fault and None if it is missing or no table."""
    found = table.values.get(key)
    if found is None:
        table.reading.fault(
            "E0414",
            f"{table.what} has no table '{key}'",
            table.reading.toml.key(*table.path),
            f"add a table [{'.'.join(str(p) for p in (*table.path, key))}]",
        )
        return None
    if not isinstance(found, dict):
        table.wrong(key, "a table", f"a table [{key}]", write=False)
        return None
    return table.reading.table(found, (*table.path, key), f"'{key}' of {table.what}", known)


def _efficiency(table: Table) -> Efficiency:
    """Constants that are not given have the defaults of :class:`Efficiency`; its fields are the known keys."""
    if not table.has("efficiency"):
        return Efficiency()
    defaults = Efficiency()
    section = _section(table, "efficiency", tuple(f.name for f in fields(Efficiency)))
    if section is None:
        return defaults
    found: dict[str, Any] = {}
    for one in fields(Efficiency):
        default = getattr(defaults, one.name)
        if not section.has(one.name):
            continue
        if one.name in _UNITS:
            value = section.quantity(one.name, _UNITS[one.name], float(default), zero=True)
        else:
            value = section.number(one.name, float(default))
        found[one.name] = int(value) if isinstance(default, int) else value
    return replace(defaults, **found)


def read_tier(table: Table, known: Tier | None = None, *, sized: bool = True, name: str | None = None) -> Tier:
    """A tier; what is not given is that of ``known``, the tier of this name that the device's file describes.

    ``name`` is what it is called if the table does not say; without it, the table must.
    """
    name = table.text("name", default=name, example='"nvlink"')
    base = known or Tier(name, 1, 0.0, 0.0)
    collectives = base.collectives
    if table.has("collectives"):
        collectives = _collectives(table, base)
    direct = table.values.get("direct", base.direct)
    if not isinstance(direct, bool):
        table.wrong("direct", "true or false", "true")
        direct = False
    return Tier(
        name=name,
        size=table.whole("size") if sized else table.whole("size", default=1),
        bandwidth=table.quantity("bandwidth", "rate", known.bandwidth if known else None),
        latency=table.quantity("latency", "seconds", known.latency if known else None, zero=True),
        efficiency=_share(table, "efficiency", base.efficiency),
        oversubscription=table.number("oversubscription", base.oversubscription, least=1.0),
        overhead=table.quantity("overhead", "seconds", base.overhead, zero=True),
        ramp=table.quantity("ramp", "bytes", base.ramp, zero=True),
        floor=_share(table, "floor", base.floor),
        in_switch=table.number("in_switch", base.in_switch, most=2.0),
        direct=direct,
        collectives=collectives,
    )


def _share(table: Table, key: str, default: float) -> float:
    return table.number(key, default, least=0.001, most=2.0 if key == "efficiency" else 1.0)


def _collectives(table: Table, base: Tier) -> tuple[Collective, ...]:
    section = _section(table, "collectives", KINDS)
    found = []
    for kind in KINDS if section else ():
        entry = section.values.get(kind) if section else None
        if entry is None or section is None:
            continue
        if not isinstance(entry, dict):
            section.wrong(kind, "a table", '{ efficiency = 0.8, overhead = "20 us" }')
            continue
        keys = ("efficiency", "overhead", "staging", "passing", "growth")
        one = table.reading.table(entry, (*section.path, kind), f"'{kind}' of {table.what}", keys)
        found.append(
            Collective(
                kind,
                _share(one, "efficiency", base.efficiency),
                one.quantity("overhead", "seconds", base.overhead, zero=True),
                one.number("staging", base.staging_of(kind)),
                one.number("growth", 0.0, most=MOST_GROWTH),
                one.number("passing", base.passing_of(kind)),
            )
        )
    return tuple(found)


def device_table(reading: Reading, values: dict[str, Any], path: Path, what: str) -> Table:
    """The table of a device, its keys checked."""
    return reading.table(values, path, what, DEVICE_KEYS)
