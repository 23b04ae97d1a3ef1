"""Work that all ranks do together: if it fails on one, all raise the same error and none waits in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from meshwright.compiler.diagnostics import MeshwrightError

T = TypeVar("T")


def distributed() -> bool:
    """Whether this process is one of several that communicate."""
    return dist.is_available() and dist.is_initialized()


def rank_of() -> tuple[int, int]:
    """This process's rank and the number of ranks; 0 of 1 for a process alone."""
    return (dist.get_rank(), dist.get_world_size()) if distributed() else (0, 1)


def together(part: Callable[[], T], *, on_rank_0: bool = False) -> list[T]:
    """Do a part of the work on every rank (or on rank 0 alone), then fail on all ranks if it failed on any."""
    result: T | None = None
    failure: MeshwrightError | None = None
    if not on_rank_0 or rank_of()[0] == 0:
        try:
            result = part()
        except MeshwrightError as failed:
            failure = failed
    everyone: list[tuple[T | None, tuple[object, ...] | None]] = [(result, failure.diagnostics if failure else None)]
    if distributed():
        everyone = everyone * dist.get_world_size()
        dist.all_gather_object(everyone, (result, failure.diagnostics if failure else None))
    for _, diagnostics in everyone:
        if diagnostics is not None:
            raise MeshwrightError(*diagnostics)  # type: ignore[arg-type]  # they are diagnostics
    return [r for r, _ in everyone]  # type: ignore[misc]  # None only where the part gives None
