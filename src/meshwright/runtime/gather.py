"""Whole, unsharded weights under their own names, gathered from the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compiler.graph.pipeline_program import copies_of
from meshwright.compiler.mesh import Mesh, Sharding
from meshwright.compiler.plan import PIPE
from meshwright.runtime.holdings import Held, held
from meshwright.runtime.layout import assemble
from meshwright.runtime.materialize import names_of
from meshwright.runtime.step_executor import RankCommunicator, StepExecutor


def gather(local: Tensor, sharding: Sharding, mesh: Mesh, communicator: RankCommunicator) -> Tensor:
    """A whole tensor on every rank, from the shards of all. All ranks call it together."""
    axes = tuple(a for a in mesh.names if a in sharding.axes)
    if not axes:
        return local.clone()
    group = mesh.group(communicator.rank, axes)
    parts = communicator.all_gather(local.unsqueeze(0).contiguous(), axes)
    own = mesh.coordinates(communicator.rank)
    return assemble(
        lambda c: parts[group.index(mesh.rank({**own, **{a: c[a] for a in axes}}))], sharding, mesh
    )  # fmt: skip


def full_state_dict(executor: StepExecutor, *, only_on_rank_0: bool = False) -> dict[str, Tensor]:
    """All parameters (tied ones under every name) and buffers, whole, on the CPU, named as in ``nn.Module.state_dict``.

    All ranks call it together; one tensor at a time is gathered. With ``only_on_rank_0`` the others get an empty dict.
    """
    program, communicator = executor.rank_program, executor.communicator
    copies = copies_of(program)
    at = program.mesh.coordinates(communicator.rank)
    names = {p.name: names_of(p) for p in program.program.parameters}
    result: dict[str, Tensor] = {}
    for value, place in held(program).items():
        if value.kind == "state" or value.name in copies:
            continue
        whole = None
        if place.on(at):
            local = executor.holdings.of(value.kind)[value.name]
            whole = gather(local, place.sharding, program.mesh, communicator)
        if place.holders is not None:
            whole = _handed_on(whole, place, communicator, executor.device)
        assert whole is not None
        if only_on_rank_0 and executor.communicator.rank:
            continue
        result.update(dict.fromkeys(names.get(value.name, (value.name,)), whole.cpu()))
    return result


def _handed_on(whole: Tensor | None, place: Held, communicator: RankCommunicator, device: torch.device) -> Tensor:
    """What the first rank that holds a tensor has of it, on all ranks of the axis ``pipe``."""
    own = whole is not None and place.holders is not None and communicator.coordinate(PIPE) == place.holders[0]
    given = whole.contiguous() if own and whole is not None else _zeros(place, device)
    return communicator.all_reduce(given, (PIPE,), "sum")


def _zeros(place: Held, device: torch.device) -> Tensor:
    return torch.zeros(place.spec.shape, dtype=place.spec.dtype, device=device)
