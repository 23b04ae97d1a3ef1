"""The plan that a ``.mw`` file's ``parallel`` section asks for, and what it leaves to the planner."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from meshwright.compiler.diagnostics import Span
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.mesh import Mesh, Segment, Sharding
from meshwright.compiler.plan import Hashes, ParameterPlan, Plan, Recompute, Storage
from meshwright.compiler.search.candidate import DATA, REPLICA, TENSOR
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.pins import Pins, Placed
from meshwright.frontend.language.build import declared_parameters
from meshwright.frontend.language.load import LoadedFile
from meshwright.frontend.language.parallel import ParallelSection
from meshwright.frontend.source import Source


def pinned_plan(source: Source, program: StepProgram) -> Plan | None:
    """The plan of the ``parallel`` section, or None if there is none that gives a mesh.

    The batch is cut by the mesh axes on which the file shards its batch axis; if it does not say, by those that
    cut no other axis of a tensor.
    """
    section = source.loaded.parallel if source.loaded is not None else None
    if section is None or source.loaded is None or not section.mesh:
        return None
    mesh = Mesh(section.mesh)
    shard = {axis: placement.on for axis, placement in (section.shard or {}).items()}
    storage = {kind: placement.on for kind, placement in (section.storage or {}).items()}
    batch_axis = source.loaded.dimensions.batch
    cutting = {a for axis, on in shard.items() if axis != batch_axis for a in on}
    batch = shard.get(batch_axis, tuple(a for a in mesh.names if a not in cutting))
    return Plan(
        mesh=mesh,
        batch=batch,
        microbatches=section.microbatches or 1,
        storage=_storage(storage),
        sequence=section.sequence.on if section.sequence else (),
        parameters=_parameters(source.loaded, shard),
        precision=source.precision,
        recompute=tuple(Recompute(pattern) for pattern in source.loaded.recomputed),
        hashes=Hashes(program.fingerprint, torch.__version__),
        name=f"the parallel section of {source.loaded.path}",
    )


def _storage(storage: dict[str, tuple[str, ...]]) -> Storage:
    """Sharded weights imply sharded gradients, and those sharded state."""
    weights = storage.get("weights", ())
    gradients = storage.get("gradients", weights)
    return Storage(weights, gradients, storage.get("state", gradients))


def _parameters(loaded: LoadedFile, shard: Mapping[str, tuple[str, ...]]) -> tuple[ParameterPlan, ...]:
    """One entry for each kind of parameter of which some axis is sharded: copies of a repeat share one."""
    plans: dict[str, ParameterPlan] = {}
    for name, declared in declared_parameters(loaded.checked.model).items():
        if any(axis in shard for axis in declared.axes):
            sizes = zip(declared.shape, declared.axes, strict=True)
            dims = tuple((Segment(size, shard.get(axis, ())),) for size, axis in sizes)
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
            plans[pattern] = ParameterPlan(pattern, Sharding(dims))
    return tuple(plans.values())


def section_pins(source: Source) -> Pins:
    """What the ``parallel`` section fixes for the planner, each pin with its line.

    A mesh axis over which tensors are stored is the data axis, one that cuts the batch alone the replica axis, one
    that cuts another axis of tensors the tensor axis. Which axes of tensors it cuts, and what is recomputed, are as the
    section says.
    """
    section = source.loaded.parallel if source.loaded is not None else None
    if section is None or source.loaded is None:
        return Pins()
    texts: list[tuple[str, Span | None]] = []
    storage = {kind: placement.on for kind, placement in section.storage.items()}
    stored = {axis for on in storage.values() for axis in on}
    cutting = _cutting(source.loaded, section)
    sizes = {"ddp": 1, "data": 1, "tp": 1}
    for axis, size in section.mesh:
        sizes["data" if axis in stored else "tp" if axis in cutting else "ddp"] *= size
    level = "fsdp" if storage.get("weights") else "zero2" if storage.get("gradients") else "zero1"
    for word, size in sizes.items():
        if section.mesh and (size > 1 or word == "tp"):
            texts.append((f"{level if word == 'data' else word}={size}", section.mesh_span))
    if stored and sizes["data"] == 1:
        texts.append((level, next(p.span for p in section.storage.values())))
    if section.sequence is not None:
        texts.append(("sp", section.sequence.span))
    if section.microbatches is not None:
        texts.append((f"micro={section.microbatches}", section.microbatches_span))
    pins = parse_pins([t for t, _ in texts], [s for _, s in texts])
    return _recomputed(_placed(pins, source.loaded, section, stored), source.loaded, section)


def _cutting(loaded: LoadedFile, section: ParallelSection) -> dict[str, Span]:
    """The mesh axes that cut an axis of tensors other than the batch, each with the line that says so."""
    shard = [p for axis, p in section.shard.items() if axis != loaded.dimensions.batch]
    return {axis: placement.span for placement in reversed(shard) for axis in placement.on}


def _placed(pins: Pins, loaded: LoadedFile, section: ParallelSection, stored: set[str]) -> Pins:
    """The pins and which axes of tensors the tensor axes cut. An axis that stores too is left to the planner."""
    cutting = _cutting(loaded, section)
    axes = [(axis, size) for axis, size in section.mesh if axis in cutting and size > 1]
    if not axes or any(axis in stored for axis, _ in axes):
        return pins
    taken = {name for name, _ in axes}
    names = {name: name if name not in (REPLICA, DATA) else f"{TENSOR}_{name}" for name in taken}
    if len(axes) == 1:
        names = dict.fromkeys(taken, TENSOR)
    shard = {
        axis: on
        for axis, placement in section.shard.items()
        if axis != loaded.dimensions.batch and (on := tuple(names[a] for a in placement.on if a in taken))
    }
    placed = Placed(tuple((names[a], size) for a, size in axes), _parameters(loaded, shard))
    word = f"shard {', '.join(shard)} on {', '.join(dict.fromkeys(a for p in shard for a in section.shard[p].on))}"
    return replace(pins, placed=placed, whole=()).said(("placed", "whole"), word, next(iter(cutting.values())))


def _recomputed(pins: Pins, loaded: LoadedFile, section: ParallelSection) -> Pins:
    """The pins and what is computed again in backward."""
    entries = tuple(Recompute(pattern) for pattern in loaded.recomputed)
    if not entries:
        return pins
    word, place = f"recompute {', '.join(section.recompute)}", next(iter(section.recompute.values()))
    return replace(pins, recompute=entries, save="all", every=1).said(("recompute", "save", "every"), word, place)
