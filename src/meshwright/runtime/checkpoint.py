"""Save and load checkpoints that any mesh can load.

Parameters, buffers and optimizer state are stored whole, under their own names, by ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from meshwright.compiler.diagnostics import Diagnostic, DiagnosticWarning, MeshwrightError, error, nearest
from meshwright.compiler.graph.pipeline_program import copies_of
from meshwright.compiler.graph.program import MASTER_COPY, Value
from meshwright.compiler.numerics.casts import HALVES
from meshwright.runtime.checkpoint_folder import (
    Record,
    checksum,
    commit,
    find,
    make_fresh,
    name_of,
    read_record,
    verify,
)
from meshwright.runtime.checkpoint_planner import Shards, ShardsLoadPlanner, ShardsSavePlanner, stored_name
from meshwright.runtime.holdings import Held
from meshwright.runtime.together import distributed, rank_of, together
from meshwright.runtime.torch_distributed import (
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    read_checkpoint,
    write_checkpoint,
)


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where and when to save: every so many steps (0: never between) and at the end; how many to keep (0: all)."""

    folder: Path
    every: int = 0
    keep: int = 3
    at_end: bool = True


def save(shards: Shards, folder: str | Path, *, step: int, seed: int, keep: int = 0, data: str = "") -> Path:
    """Write a checkpoint of ``step`` steps done and return its folder. All ranks call it together.

    ``data`` says what the steps were trained on. Raises MeshwrightError E0623 if the folder cannot be written.
    """
    root = Path(folder)
    final = root / name_of(step)
    partial = root / f"{final.name}.partial"
    together(lambda: make_fresh(partial), on_rank_0=True)
    with _clear_errors(
        "E0623", f"the checkpoint '{final}' cannot be written", "see that there is space and permission"
    ):
        write_checkpoint(
            {},
            storage_writer=FileSystemWriter(partial, sync_files=True),
            planner=ShardsSavePlanner(shards),
            no_dist=not distributed(),
        )
    sums = together(lambda: {f.name: checksum(f) for f in sorted(partial.glob("*.distcp")) if _mine(f)})
    files = {name: entry for part in sums for name, entry in part.items()}
    record = Record(step, seed, shards.rank_program.program.fingerprint, files=files, data=data)
    together(lambda: commit(root, partial, final, record, keep), on_rank_0=True)
    return final


def load(shards: Shards, place: str | Path, *, state: bool = True) -> Record:
    """Read a checkpoint into the shards, in place, whatever mesh wrote it. All ranks call it together.

    ``place`` is a checkpoint's folder, or the folder of checkpoints, of which the latest is taken. Without ``state``
    the optimizer state stays as it is, but for master copies, which begin as the weights that are read. Raises
    MeshwrightError: E0620 if there is none, E0621 if it is broken, E0622 if it does not fit the program.
    """
    folder = find(place)
    record = read_record(folder)
    together(lambda: verify(folder, record, *rank_of()))
    action = "load an earlier checkpoint"
    with _clear_errors("E0621", f"the checkpoint '{folder}' is broken", action):
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
    names = _match(shards, metadata, folder, state)
    with _clear_errors("E0621", f"the checkpoint '{folder}' is broken", action):
        read_checkpoint({}, storage_reader=reader, planner=ShardsLoadPlanner(shards, names), no_dist=not distributed())
    return record


def _match(shards: Shards, metadata: Metadata, folder: Path, state: bool) -> dict[Value, str]:
    """The stored name of everything that is to be read. Raises MeshwrightError E0622."""
    stored = metadata.state_dict_metadata
    aliases = {p.name: p.aliases for p in shards.rank_program.program.parameters}
    copies = copies_of(shards.rank_program)
    names: dict[Value, str] = {}
    begun: list[str] = []
    for value, place in shards.held().items():
        copied = value.kind == "state" and shards.rank_program.program.begins_as_its_parameter(value.name)
        if value.kind == "state" and not state and not copied:
            continue
        name = copies.get(value.name, value.name)
        owner, _, entry = name.partition("/")
        candidates = [name, *("/".join(filter(None, (a, entry))) for a in aliases.get(owner, ()))]
        found = next((f"{value.kind}/{c}" for c in candidates if f"{value.kind}/{c}" in stored), None)
        if copied and (found is None or not state):
            candidates = [owner, *aliases.get(owner, ())]
            found = next((f"parameter/{c}" for c in candidates if f"parameter/{c}" in stored), None)
            begun += [value.name] if state else []
        if found is None:
            raise _lacking(value, folder, list(stored))
        _check_shape(value, place, stored[found], folder)
        names[value] = found
    if begun:
        _tell_begun(begun, folder)
    if state:
        _tell_dropped(shards, stored, folder)
    return names


def _tell_begun(begun: list[str], folder: Path) -> None:
    message = f"the checkpoint '{folder}' has no master weights ('{begun[0]}'): {len(begun)} begin as its weights"
    action = "nothing, if it was written without them; what was rounded away before is not there any more"
    warnings.warn(DiagnosticWarning(Diagnostic("W0786", message, action=action)), stacklevel=4)


def _tell_dropped(shards: Shards, stored: Mapping[str, object], folder: Path) -> None:
    """Warn of master weights of a checkpoint that the program keeps in no fp32: they go on as their rounded weights."""
    program = shards.rank_program.program
    kept = {f"state/{name}" for name in program.state}
    halves = {name for p in program.parameters if p.spec.dtype in HALVES for name in (p.name, *p.aliases)}
    dropped = [n for n in stored if n not in kept and n.startswith("state/") and _master_of(n) in halves]
    if dropped:
        name = dropped[0].partition("/")[2]
        message = (
            f"the checkpoint '{folder}' has master weights in fp32 ('{name}', of {len(dropped)}), which this plan "
            "does not keep: training goes on from the rounded weights"
        )
        action = 'write numerics = "safe" in the plan to go on from the master weights'
        warnings.warn(DiagnosticWarning(Diagnostic("W0787", message, action=action)), stacklevel=4)


def _master_of(name: str) -> str | None:
    owner, _, entry = name.partition("/")[2].rpartition("/")
    return owner if entry == MASTER_COPY else None


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


def _mine(file: Path) -> bool:
    """Whether this rank wrote the file; torch names them ``__<rank>_<number>.distcp``."""
    return not distributed() or file.name.startswith(f"__{dist.get_rank()}_")


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
