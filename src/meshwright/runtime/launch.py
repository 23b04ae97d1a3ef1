"""Start the ranks of a run on this machine, as torchrun would, and end with one clean error if a rank fails."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, error
from meshwright.runtime.failure import LAUNCHED, RankFailed

LOOPBACK = "127.0.0.1"


def launch(ranks: int, module: str, arguments: Sequence[str], *, variables: Mapping[str, str] | None = None) -> None:
    """Run ``python -m module arguments`` on ``ranks`` ranks of this machine, meeting on the loopback interface.

    Rank 0 has this process's terminal, the others are silent unless they fail. Raises RankFailed with the first rank's
    error, MeshwrightError E0602 if a rank died without one or E0609 for an impossible number.
    """
    if ranks < 1:
        raise error("E0609", f"{ranks} ranks cannot be started", action="give a number of ranks of at least 1")
    logs = tempfile.mkdtemp(prefix="meshwright-")
    try:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="meshwright",
            rdzv_backend="static",
            rdzv_endpoint=f"{LOOPBACK}:{free_port()}",
            rdzv_configs={"rank": 0, "timeout": 900},
            max_restarts=0,
            monitor_interval=0.1,
            local_addr=LOOPBACK,
            logs_specs=DefaultLogsSpecs(logs, redirects=dict.fromkeys(range(1, ranks), Std.ALL)),
        )
        with _variables({**defaults(ranks), **(variables or {}), LAUNCHED: "1"}), _quiet():
            try:
                elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
            except ChildFailedError as failed:
                _explain(failed, logs)
            except SignalException as stopped:
                if stopped.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise SystemExit(128 + stopped.sigval) from None
    finally:
        shutil.rmtree(logs, ignore_errors=True)


def defaults(ranks: int) -> dict[str, str]:
    """The variables that are set for the ranks unless the user has set them."""
    found = {"GLOO_SOCKET_IFNAME": _loopback_name()} if _loopback_name() else {}
    found["OMP_NUM_THREADS"] = str(max(1, cores() // ranks))
    found["TOKENIZERS_PARALLELISM"] = "false"
    return {name: os.environ.get(name, value) for name, value in found.items()}


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _loopback_name() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "")


def _explain(failed: ChildFailedError, logs: str) -> None:
    failures: list[ProcessFailure] = sorted(failed.failures.values(), key=lambda f: f.timestamp)
    told = next((f for f in failures if _text(f)), None)
    # a rank that was killed explains the others, which only lost their connection to it
    killed = next((f for f in failures if f.exitcode < 0 and f.exitcode != -signal.SIGTERM), None)
    if killed is not None:
        name = signal.Signals(-killed.exitcode).name
        memory = " (often: out of memory)" if name == "SIGKILL" else ""
        raise MeshwrightError(
            Diagnostic(
                "E0602",
                f"rank {killed.local_rank} was killed by {name}{memory}",
                action="see dmesg or the scheduler's log, then resume from the last checkpoint",
            )
        ) from None
    if told is not None:
        raise RankFailed(_text(told)) from None
    first = failures[0]
    raise MeshwrightError(
        Diagnostic(
            "E0602",
            f"rank {first.local_rank} ended with exit code {first.exitcode} and told no reason",
            action="run the ranks one by one under torchrun to see their output",
            notes=tuple(_last_lines(logs, first.local_rank)),
        )
    ) from None


def _text(failure: ProcessFailure) -> str:
    """What our worker left in the error file; empty if it left none."""
    data = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    text = data.get("message") if isinstance(data, dict) else None
    return text if isinstance(text, str) and text.startswith(("error[", "warning[")) else ""


def _last_lines(logs: str, local_rank: int) -> list[str]:
    for folder, _, files in os.walk(logs):
        if os.path.basename(folder) == str(local_rank) and "stderr.log" in files:
            with open(os.path.join(folder, "stderr.log"), errors="replace") as stream:
                return [line.rstrip() for line in stream.readlines()[-5:]]
    return []


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the launcher's own log, which dumps what we tell in one error."""
    loggers = [logging.getLogger("torch.distributed.elastic"), logging.getLogger("torch.distributed.launcher")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
