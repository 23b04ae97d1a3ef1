"""Reads what a plan's TOML form says of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.compiler.diagnostics import suggestion
from meshwright.compiler.plan import PIPE, Pipeline
from meshwright.compiler.recompute_reader import Reader
from meshwright.compiler.schedules.catalogue import modules


def read_pipeline(reader: Reader, table: dict[str, Any] | None, mesh: Mapping[str, int]) -> Pipeline | None:
    """The table ``[pipeline]``. Faults: E0313, E0314 if the axis ``pipe`` or the table lacks the other, E0501 for an
    unknown schedule."""
    if table is None:
        if PIPE in mesh:
            message = f"the mesh has the axis '{PIPE}', but nothing says how blocks are cut over it"
            action = "add a table [pipeline] with first_blocks = [...]"
            reader.fault("E0314", message, reader.toml.key("mesh", PIPE), action)
        return None
    known = reader.table("pipeline", table, ("pipeline",))
    blocks = known.get("first_blocks", [])
    if PIPE not in mesh and mesh:
        message = f"there is a pipeline, but the mesh has no axis '{PIPE}'"
        reader.fault("E0314", message, reader.toml.key("pipeline"), f"add {PIPE} = 2, say, under [mesh]")
    if not all(isinstance(block, str) for block in blocks):
        place = reader.toml.value("pipeline", "first_blocks")
        reader.fault("E0313", "'first_blocks' must be a list of names of blocks", place, 'write ["layers.2"]')
        blocks = []
    name = known.get("schedule", "1f1b")
    if name not in modules():
        place = reader.toml.value("pipeline", "schedule")
        reader.fault("E0501", f"there is no schedule '{name}'", place, suggestion(name, modules()))
    return Pipeline(tuple(blocks), name, known.get("table", ""))
