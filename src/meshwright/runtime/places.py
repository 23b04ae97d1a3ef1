"""The places that a run writes to: whether it can, and what an earlier run has left there.

Two runs in one place would mix: their metrics in one file, and the checkpoints of one counted as those of the other.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from meshwright.compiler.diagnostics import error
from meshwright.runtime.checkpoint_folder import LATEST, complete_in


def check_places(checkpoints: Path, metrics: Path) -> None:
    """Whether a run can write there. Raises MeshwrightError E0623 for checkpoints, E0627 for metrics."""
    if reason := _refusal(checkpoints):
        raise error(
            "E0623",
            f"checkpoints cannot be written to '{checkpoints}': {reason}",
            action="give --checkpoints a folder that can be written",
        )
    reason = "it is a folder" if metrics.is_dir() else ""
    if metrics.is_file() and not os.access(metrics, os.W_OK):
        reason = "it is read-only"
    if reason := reason or _refusal(metrics.parent):
        action = "give --metrics a file that can be written"
        raise error("E0627", f"metrics cannot be written to '{metrics}': {reason}", action=action)


def check_unused(checkpoints: Path, metrics: Path) -> None:
    """Whether no earlier run has left anything there. Raises MeshwrightError E0625."""
    left = [f"checkpoints in '{checkpoints}'"] if complete_in(checkpoints) else []
    left += [f"metrics in '{metrics}'"] if metrics.is_file() and metrics.stat().st_size else []
    if left:
        raise error(
            "E0625",
            f"an earlier run has left {' and '.join(left)}",
            action="give --resume to go on with it, or --fresh to move that aside and begin anew",
        )


def move_aside(checkpoints: Path | None, metrics: Path | None) -> None:
    """Moves what an earlier run has left into the first free of ``earlier-1``, ``earlier-2``, ... beside it.

    Raises MeshwrightError E0623 if it cannot be moved.
    """
    moves: list[tuple[Path, str]] = []
    if checkpoints is not None:
        found = [*complete_in(checkpoints), checkpoints / LATEST]
        moves += [(file, f"{checkpoints.name}/{file.name}") for file in found if file.exists()]
    if metrics is not None and metrics.is_file():
        moves.append((metrics, metrics.name))
    if not moves:
        return
    beside = (metrics or checkpoints or moves[0][0]).parent
    number = 1
    while (beside / f"earlier-{number}").exists():
        number += 1
    aside = beside / f"earlier-{number}"
    try:
        for file, name in moves:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(file, aside / name)
    except OSError as refused:
        message = f"what an earlier run has left cannot be moved to '{aside}': {refused}"
        raise error("E0623", message, action="see that there is space and permission") from refused


def _refusal(folder: Path) -> str:
    """Why files cannot be written to a folder that may not exist yet; empty if they can."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        return f"'{existing}' is no folder"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"'{existing}' is not writable"
