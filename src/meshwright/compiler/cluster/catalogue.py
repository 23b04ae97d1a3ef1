"""The devices that Meshwright knows: one TOML file each, found by listing the folder ``devices``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from meshwright.compiler.cluster.cluster import Tier
from meshwright.compiler.cluster.device import Device
from meshwright.compiler.cluster.device_table import TIER_KEYS, device_table, read_device, read_tier
from meshwright.compiler.cluster.reading import Reading, Table
from meshwright.compiler.diagnostics import nearest
from meshwright.compiler.toml_text import parse_toml


@dataclass(frozen=True)
class Entry:
    """A device of the catalogue, and the links that machines of it usually have."""

    device: Device
    description: str
    aliases: tuple[str, ...]
    tiers: tuple[Tier, ...]
    """Innermost first. The size of a tier is the most that it connects; that of the last one is open (1)."""


@cache
def names() -> tuple[str, ...]:
    """The names of all devices, which are those of their files."""
    folder = files("meshwright.compiler.cluster") / "devices"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


@cache
def entry(name: str) -> Entry:
    """The catalogue's entry of a device. ``name`` is one of :func:`names`."""
    resource = files("meshwright.compiler.cluster") / "devices" / f"{name}.toml"
    toml = parse_toml(resource.read_text(encoding="utf-8"), f"{name}.toml", "E0411")
    reading = Reading(toml)
    table = device_table(reading, toml.values, (), f"device '{name}'")
    device = read_device(table, name)
    tiers = tuple(read_tier(one, sized=False) for one in table.tables("tier", "a tier", TIER_KEYS))
    reading.finish()
    return Entry(device, table.text("description"), tuple(toml.values.get("aliases", ())), tiers)


@cache
def known_names() -> dict[str, str]:
    """By every name and alias: the device's own name."""
    found = {name: name for name in names()}
    for name in names():
        found.update(dict.fromkeys(entry(name).aliases, name))
    return found


def find(name: str) -> Entry | None:
    """The entry of a device by its name or an alias, in any case of letters; None if there is none."""
    own = known_names().get(name.strip().lower())
    return entry(own) if own else None


def hint(name: str) -> str:
    """What to do about a name that no device has."""
    near = nearest(name, known_names())
    return f"did you mean '{near}'?" if near else "known: " + ", ".join(names())


def named_device(table: Table) -> Device:
    """The catalogue's device that ``device`` of a table names."""
    name = table.text("device", example='"h100"')
    found = find(name) if name else None
    if name and found is None:
        table.reading.fault("E0415", f"unknown device '{name}'", table.value("device"), hint(name))
    return found.device if found else placeholder()


def placeholder() -> Device:
    """Stands for a device whose fault has been told."""
    return Device("?", {}, 1, 1.0, 1.0)
