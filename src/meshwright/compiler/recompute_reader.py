"""Reads what a plan's TOML form says of memory, time and sums: recompute, offload, prefetch, numerics."""

from __future__ import annotations

from typing import Any, Protocol, get_args

from meshwright.compiler.diagnostics import Span, suggestion
from meshwright.compiler.plan import Numerics, Offload, Recompute, Save
from meshwright.compiler.toml_text import TomlText

SAVES: tuple[Save, ...] = get_args(Save)
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
POLICIES: tuple[Numerics, ...] = get_args(Numerics)


class Reader(Protocol):
    """What gathers the faults of a document, with its text."""

    toml: TomlText

    def fault(self, code: str, message: str, place: Span, action: str) -> None: ...

    def table(self, kind: str, table: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]: ...


def read_recompute(reader: Reader, entries: list[Any]) -> tuple[Recompute, ...]:
    """The ``[[recompute]]`` tables. Faults: E0313, E0314, E0320, E0333 (an unknown save), E0334 (every below 1)."""
    found: list[Recompute] = []
    for index, entry in enumerate(entries):
        path = ("recompute", index)
        if not isinstance(entry, dict):
            place = reader.toml.value("recompute")
            reader.fault("E0313", "'recompute' must be tables", place, "write [[recompute]] and the entries below it")
            return ()
        table = reader.table("recompute", entry, path)
        pattern, save, every = table.get("pattern", ""), table.get("save", "nothing"), table.get("every", 1)
        if "pattern" not in entry:
            action = 'add pattern = "...", such as "model.layers.*"'
            reader.fault("E0314", "this entry has no 'pattern'", reader.toml.key(*path), action)
        elif pattern in {r.pattern for r in found}:
            message = f"'{pattern}' has two entries; this one never counts"
            reader.fault("E0320", message, reader.toml.value(*path, "pattern"), "delete one of the two")
        if save not in SAVES:
            place = reader.toml.value(*path, "save")
            reader.fault("E0333", f"a block cannot save '{save}'", place, suggestion(save, SAVES))
        if every < 1:
            place, action = reader.toml.value(*path, "every"), "give a whole number of at least 1; 1 is every block"
            reader.fault("E0334", f"every is {every}", place, action)
        found.append(Recompute(pattern, save, every))
    return tuple(found)


def read_offload(reader: Reader, names: list[Any]) -> tuple[Offload, ...]:
    """The list ``offload``. Faults: E0313, E0336 for what cannot be offloaded."""
    for number, name in enumerate(names):
        if not isinstance(name, str):
            reader.fault("E0313", "'offload' must be a list of names", reader.toml.value("offload"), 'write ["state"]')
            return ()
        place = reader.toml.value("offload", piece=name, occurrence=names[:number].count(name))
        if name not in OFFLOADS:
            action = f"'{OFFLOADS[0]}' (of the optimizer) can be kept in the host's memory"
            reader.fault("E0336", f"'{name}' cannot be offloaded", place, action)
        elif name in names[:number]:
            reader.fault("E0336", f"'{name}' is offloaded twice", place, "name it once")
    return tuple(names)


def read_numerics(reader: Reader, word: str) -> Numerics:
    """The policy ``numerics``. Faults: E0338 for one that is unknown."""
    for policy in POLICIES:
        if word == policy:
            return policy
    place = reader.toml.value("numerics")
    reader.fault("E0338", f"unknown policy '{word}' of numerics", place, suggestion(word, POLICIES))
    return "warn"


def read_prefetch(reader: Reader, count: int) -> int:
    """The number ``prefetch``. Faults: E0337 if it is negative."""
    if count < 0:
        action = "give 0 (when they are needed) or the number of blocks ahead"
        reader.fault("E0337", f"prefetch is {count}", reader.toml.value("prefetch"), action)
    return count
