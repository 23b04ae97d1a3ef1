"""The plan that a ``.mw`` file's ``parallel`` section asks for, and what it leaves to the planner."""

from __future__ import annotations

import torch

from meshwright.compiler.diagnostics import Span, error
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.mesh import Mesh, Segment, Sharding
from meshwright.compiler.plan import Hashes, ParameterPlan, Plan, Recompute, Storage
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.pins import Pins
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
        parameters=_parameters(source.loaded.parameter_axes, shard, program),
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


def _parameters(
    axes: dict[str, tuple[str, ...]], shard: dict[str, tuple[str, ...]], program: StepProgram
) -> tuple[ParameterPlan, ...]:
    """One entry for each parameter of which some axis is sharded."""
    plans = []
    for name, named in axes.items():
        if not any(axis in shard for axis in named):
            continue
        try:
            shape = program.parameter(name).spec.shape
        except KeyError:
            raise error("E0303", f"the step has no parameter '{name}'") from None
        dims = tuple((Segment(size, shard.get(axis, ())),) for size, axis in zip(shape, named, strict=True))
        plans.append(ParameterPlan(name, Sharding(dims)))
    return tuple(plans)


def section_pins(source: Source) -> Pins:
    """What the ``parallel`` section fixes for the planner, each pin with its line.

    A mesh axis over which tensors are stored is the data axis, one that cuts the batch alone the replica axis, one
    that cuts another axis of tensors the tensor axis.
    """
    section = source.loaded.parallel if source.loaded is not None else None
    if section is None or source.loaded is None:
        return Pins()
    texts: list[tuple[str, Span | None]] = []
    storage = {kind: placement.on for kind, placement in section.storage.items()}
    stored = {axis for on in storage.values() for axis in on}
    cutting = {a for axis, p in section.shard.items() if axis != source.loaded.dimensions.batch for a in p.on}
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
    return parse_pins([t for t, _ in texts], [s for _, s in texts])
