"""The folders of checkpoints: names, records, checksums, and how one comes to be in a single instant.

A checkpoint is a folder ``step-00000100`` with the files of ``torch.distributed.checkpoint`` and
``meshwright.json`` (step, seed, checksums of the files). It is written under a temporary name and renamed
when complete; ``latest`` holds the name of the newest.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshwright.compiler.diagnostics import error

FORMAT = 1
RECORD = "meshwright.json"
LATEST = "latest"


@dataclass(frozen=True)
class Record:
    """What stands in ``meshwright.json``. ``step`` is the number of steps done, the next step's number."""

    step: int
    seed: int
    fingerprint: str = ""
    format: int = FORMAT
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size and CRC-32 of every data file."""
    data: str = ""
    """What the run was trained on, in words; empty: not known."""


def name_of(step: int) -> str:
    return f"step-{step:08}"


def find(place: str | Path) -> Path:
    """The checkpoint's folder: ``place`` itself or the latest in it. Raises MeshwrightError E0620."""
    root = Path(place)
    if (root / RECORD).is_file():
        return root
    pointer = root / LATEST
    if pointer.is_file():
        named = root / pointer.read_text(encoding="utf-8").strip()
        if (named / RECORD).is_file():
            return named
    complete = complete_in(root)
    if complete:
        return complete[-1]
    raise error("E0620", f"there is no checkpoint in '{root}'", action="check the path, or begin without one")


def complete_in(root: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    found = (p for p in root.glob("step-*") if p.suffix != ".partial" and (p / RECORD).is_file())
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def read_record(folder: Path) -> Record:
    """Raises MeshwrightError E0621 if the record cannot be read."""
    try:
        entries = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        record = Record(**{**entries, "files": {n: (int(s), int(c)) for n, (s, c) in entries["files"].items()}})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as broken:
        raise error(
            "E0621", f"'{folder / RECORD}' cannot be read: {broken}", action="load an earlier checkpoint"
        ) from broken
    if record.format != FORMAT:
        raise error(
            "E0622",
            f"the checkpoint '{folder}' has the format {record.format}, this version reads {FORMAT}",
            action="load it with the version that wrote it",
        )
    return record


def checksum(file: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    size = total = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            size += len(block)
            total = zlib.crc32(block, total)
    return size, total


def make_fresh(partial: Path) -> None:
    """An empty folder to write a checkpoint into. Raises MeshwrightError E0623."""
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as refused:
        raise error(
            "E0623", f"'{partial}' cannot be made: {refused}", action="see that there is space and permission"
        ) from refused


def commit(root: Path, partial: Path, final: Path, record: Record, keep: int) -> None:
    """Give a checkpoint that is written its name, let ``latest`` name it, drop the oldest. Raises E0623."""
    try:
        _write(partial / RECORD, json.dumps(asdict(record), indent=1))
        replaced = root / f"{final.name}.replaced.partial"
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        pointer = root / f"{LATEST}.partial"
        _write(pointer, final.name + "\n")
        pointer.replace(root / LATEST)
        # by time, not by step: a run that went back to an earlier checkpoint keeps its own
        by_time = sorted(complete_in(root), key=lambda p: (p / RECORD).stat().st_mtime_ns)
        for old in by_time[:-keep] if keep else []:
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as refused:
        raise error(
            "E0623",
            f"the checkpoint '{final}' cannot be written: {refused}",
            action="see that there is space and permission",
        ) from refused


def _write(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def verify(folder: Path, record: Record, rank: int, ranks: int) -> None:
    """One rank's share of the files is complete and unchanged. Raises MeshwrightError E0621."""
    for number, (name, expected) in enumerate(sorted(record.files.items())):
        if number % ranks != rank:
            continue
        file = folder / name
        if not file.is_file():
            raise error(
                "E0621", f"the checkpoint '{folder}' lacks its file '{name}'", action="load an earlier checkpoint"
            )
        found = checksum(file)
        if found != expected:
            what = f"has {found[0]} bytes of {expected[0]}" if found[0] != expected[0] else "has been changed"
            raise error("E0621", f"'{file}' {what}", action="load an earlier checkpoint")
