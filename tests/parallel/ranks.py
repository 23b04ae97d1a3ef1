"""Real ranks for tests: processes forked from a server that has torch imported, so that they start at once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.runtime.launch import LOOPBACK, defaults, free_port

PRELOADED = [
    "torch",
    "torch.distributed.checkpoint",
    "meshwright.runtime.worker",
    "meshwright.api",
    "tests.parallel.ranks",
    "pytest",
]


@dataclass(frozen=True)
class Outcome:
    """What one rank did: the value that its function returned, its exit code, what it printed."""

    value: Any
    exit_code: int | None
    output: str
    seconds: float


def run_ranks(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    variables: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> list[Outcome]:
    """Run ``function(*arguments)`` on so many ranks, with the variables that torchrun would set.

    The function must be at the top of a module. The ranks that have not ended after ``timeout`` seconds are killed.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    shared = {**defaults(ranks), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": LOOPBACK}
    shared |= {"MASTER_PORT": str(free_port()), **(variables or {})}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        processes = []
        for rank in range(ranks):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = server.Process(target=_rank, args=(f"{folder}/{rank}", own, function, arguments))
            process.start()
            processes.append(process)
        seconds = []
        for process in processes:
            process.join(max(0.0, began + timeout - time.monotonic()))
            seconds.append(time.monotonic() - began)
            if process.exitcode is None:
                process.kill()
                process.join()
        return [
            _outcome(Path(f"{folder}/{r}"), p.exitcode, s)
            for r, (p, s) in enumerate(zip(processes, seconds, strict=True))
        ]


def values(outcomes: list[Outcome]) -> list[Any]:
    """The values of ranks that must all have ended well."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0, f"rank {rank}: exit code {outcome.exit_code}\n{outcome.output}"
    return [o.value for o in outcomes]


def _outcome(base: Path, exit_code: int | None, seconds: float) -> Outcome:
    kept = base.with_suffix(".pt")
    value = torch.load(kept, weights_only=False) if kept.exists() else None
    printed = base.with_suffix(".txt")
    return Outcome(value, exit_code, printed.read_text() if printed.exists() else "", seconds)


def _rank(base: str, variables: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    file = os.open(f"{base}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(variables)
    torch.set_num_threads(1)
    code = 1
    try:
        torch.save(function(*arguments), f"{base}.pt")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
