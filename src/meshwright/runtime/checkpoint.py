"""Checkpoints that any mesh can load, written so that a crash never leaves a broken one.

A checkpoint is a folder ``step-00000100`` with the files of ``torch.distributed.checkpoint`` and
``meshwright.json`` (step, seed, checksums of the files). It is written under a temporary name and renamed
when complete; ``latest`` holds the name of the newest. Parameters, buffers and optimizer state are stored whole,
under their own names.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from meshwright.compiler.diagnostics import MeshwrightError, error, nearest
from meshwright.compiler.graph.program import Value
from meshwright.runtime.checkpoint_planner import Shards, ShardsLoadPlanner, ShardsSavePlanner, stored_name
from meshwright.runtime.holdings import Held
from meshwright.runtime.torch_distributed import (
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    read_checkpoint,
    write_checkpoint,
)

T = TypeVar("T")
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


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where and when to save: every so many steps (0: never between) and at the end; how many to keep (0: all)."""

    folder: Path
    every: int = 0
    keep: int = 3
    at_end: bool = True


def save(shards: Shards, folder: str | Path, *, step: int, seed: int, keep: int = 0) -> Path:
    """Write a checkpoint of ``step`` steps done and return its folder. All ranks call it together.

    Raises MeshwrightError E0623 if the folder cannot be written.
    """
    root = Path(folder)
    final = root / name_of(step)
    partial = root / f"{final.name}.partial"
    _together(lambda: _fresh(partial), on_rank_0=True)
    with _clear_errors(
        "E0623", f"the checkpoint '{final}' cannot be written", "see that there is space and permission"
    ):
        write_checkpoint(
            {},
            storage_writer=FileSystemWriter(partial, sync_files=True),
            planner=ShardsSavePlanner(shards),
            no_dist=not _distributed(),
        )
    sums = _together(lambda: {f.name: checksum(f) for f in sorted(partial.glob("*.distcp")) if _mine(f)})
    files = {name: entry for part in sums for name, entry in part.items()}
    record = Record(step, seed, shards.rank_program.program.fingerprint, files=files)
    _together(lambda: _commit(root, partial, final, record, keep), on_rank_0=True)
    return final


def load(shards: Shards, place: str | Path, *, state: bool = True) -> Record:
    """Read a checkpoint into the shards, in place, whatever mesh wrote it. All ranks call it together.

    ``place`` is a checkpoint's folder, or the folder of checkpoints, of which the latest is taken. Without ``state``
    the optimizer state stays as it is. Raises MeshwrightError: E0620 if there is none, E0621 if it is
    broken, E0622 if it does not fit the program.
    """
    folder = find(place)
    record = read_record(folder)
    _together(lambda: _verify(folder, record))
    action = "load an earlier checkpoint"
    with _clear_errors("E0621", f"the checkpoint '{folder}' is broken", action):
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
    names = _match(shards, metadata, folder, state)
    with _clear_errors("E0621", f"the checkpoint '{folder}' is broken", action):
        read_checkpoint({}, storage_reader=reader, planner=ShardsLoadPlanner(shards, names), no_dist=not _distributed())
    return record


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


def _fresh(partial: Path) -> None:
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as refused:
        raise error(
            "E0623", f"'{partial}' cannot be made: {refused}", action="see that there is space and permission"
        ) from refused


def _commit(root: Path, partial: Path, final: Path, record: Record, keep: int) -> None:
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
        for old in complete_in(root)[:-keep] if keep else []:
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


def _verify(folder: Path, record: Record) -> None:
    """This rank's share of the files is complete and unchanged. Raises MeshwrightError E0621."""
    rank, ranks = _rank()
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


def _match(shards: Shards, metadata: Metadata, folder: Path, state: bool) -> dict[Value, str]:
    """The stored name of everything that is to be read. Raises MeshwrightError E0622."""
    stored = metadata.state_dict_metadata
    aliases = {p.name: p.aliases for p in shards.rank_program.program.parameters}
    names: dict[Value, str] = {}
    for value, place in shards.held().items():
        if value.kind == "state" and not state:
            continue
        owner, _, entry = value.name.partition("/")
        candidates = [value.name, *("/".join(filter(None, (a, entry))) for a in aliases.get(owner, ()))]
        found = next((f"{value.kind}/{c}" for c in candidates if f"{value.kind}/{c}" in stored), None)
        if found is None:
            raise _lacking(value, folder, list(stored))
        _check_shape(value, place, stored[found], folder)
        names[value] = found
    return names


def _lacking(value: Value, folder: Path, stored: list[str]) -> MeshwrightError:
    words = {"state": "optimizer state"}
    near = nearest(stored_name(value), [s for s in stored if s.startswith(f"{value.kind}/")])
    action = "load a checkpoint of this model"
    if value.kind == "state":
        action = "load it with the optimizer that it was written with, or without optimizer state"
    return error(
        "E0622",
        f"the checkpoint '{folder}' has no {words.get(value.kind, value.kind)} '{value.name}'",
        action=action,
        notes=[f"it has '{near.partition('/')[2]}'"] if near else [],
    )


def _check_shape(value: Value, place: Held, stored: object, folder: Path) -> None:
    shape = list(stored.size) if isinstance(stored, TensorStorageMetadata) else None
    if shape != list(place.spec.shape):
        raise error(
            "E0622",
            f"'{value.name}' has the shape {shape} in the checkpoint '{folder}', "
            f"the model needs {list(place.spec.shape)}",
            action="load a checkpoint of this model",
        )


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if _distributed() else (0, 1)


def _mine(file: Path) -> bool:
    """Whether this rank wrote the file; torch names them ``__<rank>_<number>.distcp``."""
    return not _distributed() or file.name.startswith(f"__{dist.get_rank()}_")


def _together(part: Callable[[], T], *, on_rank_0: bool = False) -> list[T]:
    """Do a part of the work on every rank (or on rank 0 alone), then fail on all ranks if it failed on any."""
    result: T | None = None
    failure: MeshwrightError | None = None
    if not on_rank_0 or _rank()[0] == 0:
        try:
            result = part()
        except MeshwrightError as failed:
            failure = failed
    everyone: list[tuple[T | None, tuple[object, ...] | None]] = [(result, failure.diagnostics if failure else None)]
    if _distributed():
        everyone = everyone * dist.get_world_size()
        dist.all_gather_object(everyone, (result, failure.diagnostics if failure else None))
    for _, diagnostics in everyone:
        if diagnostics is not None:
            raise MeshwrightError(*diagnostics)  # type: ignore[arg-type]  # they are diagnostics
    return [r for r, _ in everyone]  # type: ignore[misc]  # None only where the part gives None


@contextlib.contextmanager
def _clear_errors(code: str, message: str, action: str) -> Iterator[None]:
    """What torch or the system raise, as one diagnostic with its first cause."""
    kinds = (
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        AssertionError,
        EOFError,
        pickle.UnpicklingError,
        AttributeError,
    )
    try:
        with warnings.catch_warnings():
            # torch warns of checkpoints of a single process, which is what a virtual cluster is
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as failed:
        rank, (cause, _) = min(failed.failures.items())
        raise error(code, f"{message}: {_first_line(cause)}", action=action, notes=[f"on rank {rank}"]) from failed
    except kinds as failed:
        raise error(code, f"{message}: {_first_line(failed)}", action=action) from failed


def _first_line(cause: BaseException) -> str:
    text = str(cause).strip() or type(cause).__name__
    return text.splitlines()[0][:200]
