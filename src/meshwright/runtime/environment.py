"""Which rank this process is, from the variables that launchers set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.compiler.diagnostics import error

_SPELLINGS = {
    "RANK": ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
}


@dataclass(frozen=True)
class Place:
    """This process's rank, the number of ranks, and its number on this machine."""

    rank: int
    ranks: int
    local_rank: int


def place_of(variables: Mapping[str, str] | None = None) -> Place:
    """The place of this process; rank 0 of 1 if no launcher has set anything.

    torchrun, TorchX and Kubernetes operators set ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``;
    SLURM's, Open MPI's and MPICH's own variables are understood too.
    Raises MeshwrightError E0609 for values that are not numbers or do not fit.
    """
    found = os.environ if variables is None else variables
    given = {name: _value(found, name) for name in _SPELLINGS}
    rank, ranks = given["RANK"] or 0, given["WORLD_SIZE"] or 1
    if not 0 <= rank < ranks:
        raise error("E0609", f"RANK={rank} does not fit WORLD_SIZE={ranks}", action="start the ranks with torchrun")
    return Place(rank, ranks, given["LOCAL_RANK"] if given["LOCAL_RANK"] is not None else rank)


def complete(place: Place, variables: dict[str, str] | None = None) -> None:
    """Set what ``torch.distributed`` reads where the launcher did not; a single process meets nobody else."""
    target = os.environ if variables is None else variables
    target["RANK"], target["WORLD_SIZE"] = str(place.rank), str(place.ranks)
    target.setdefault("LOCAL_RANK", str(place.local_rank))
    if place.ranks == 1:
        target.setdefault("MASTER_ADDR", "127.0.0.1")
        target.setdefault("MASTER_PORT", "0")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in target:
            raise error(
                "E0609",
                f"the launcher has set RANK and WORLD_SIZE but not {name}",
                action="set MASTER_ADDR and MASTER_PORT to an address of rank 0, or start with torchrun",
            )


def _value(variables: Mapping[str, str], name: str) -> int | None:
    for spelling in (name, *_SPELLINGS[name]):
        if spelling in variables:
            try:
                return int(variables[spelling])
            except ValueError:
                raise error(
                    "E0609",
                    f"{spelling}={variables[spelling]!r} is not a number",
                    action="start the ranks with torchrun",
                ) from None
    return None
