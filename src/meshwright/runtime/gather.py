"""Whole, unsharded weights under their own names, gathered from the ranks."""

from __future__ import annotations

from torch import Tensor

from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.mesh import Mesh, Sharding
from meshwright.runtime.executor import Executor, RankCommunicator
from meshwright.runtime.holdings import held
from meshwright.runtime.layout import assemble
from meshwright.runtime.materialize import names_of


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


def full_state_dict(executor: Executor, *, only_on_rank_0: bool = False) -> dict[str, Tensor]:
    """All parameters (tied ones under every name) and buffers, whole, on the CPU, named as in ``nn.Module.state_dict``.

    All ranks call it together; one tensor at a time is gathered. With ``only_on_rank_0`` the others get an empty dict.
    """
    program: RankProgram = executor.rank_program
    names = {p.name: names_of(p) for p in program.program.parameters}
    result: dict[str, Tensor] = {}
    for value, place in held(program).items():
        if value.kind == "state":
            continue
        local = executor.holdings.of(value.kind)[value.name]
        whole = gather(local, place.sharding, program.mesh, executor.communicator)
        if only_on_rank_0 and executor.communicator.rank:
            continue
        result.update(dict.fromkeys(names.get(value.name, (value.name,)), whole.cpu()))
    return result
