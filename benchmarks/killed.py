"""Kill a rank of a pipelined run at a random moment, again and again: do all others end in time and name it?

    python -m benchmarks.killed [--runs 30] [--plan pp=2,fsdp=2,micro=4] [--seed 0]

Every other run is started by ``meshwright run``, which watches its ranks; the rest rank by rank, as on several
machines, where nobody but the other ranks can tell. A run counts as good if all ranks have ended within 10 seconds, the
killed one is named, and no process is left. The exit status is 1 if any does not.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.build import compile
from meshwright.runtime.launch import LOOPBACK, defaults, free_port

LIMIT = 10.0
"""Seconds after which all ranks must have ended."""
EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.mw"


@dataclass(frozen=True)
class Killed:
    """What became of one run."""

    rank: int
    steps: int
    """That were done when the rank was killed."""
    seconds: float
    told: str
    left: int
    """Processes that were still there."""

    @property
    def good(self) -> bool:
        named = re.search(rf"\brank {self.rank}\b (was killed|has died)", self.told) is not None
        return self.seconds <= LIMIT and named and not self.left


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.killed")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--plan", default="pp=2,fsdp=2,micro=4")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    chance = random.Random(given.seed)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        built = compile(str(EXAMPLE), given.plan, output=Path(folder) / "build")
        ranks = built.rank_program.mesh.ranks
        for number in range(given.runs):
            launched = number % 2 == 0
            found = kill_one(built.folder, ranks, chance.randrange(ranks), chance.uniform(0.0, 3.0), launched=launched)
            bad += not found.good
            how = "launched" if launched else "by itself"
            print(
                f"{number + 1:>3}  {how:<9}  rank {found.rank} killed after {found.steps:>3} steps: all ended within "
                f"{found.seconds:4.1f} s, {'named' if found.good else 'BAD: ' + found.told.strip()[-300:]}",
                flush=True,
            )
    print(f"{given.runs - bad} of {given.runs} runs ended as they should")
    return int(bad > 0)


def kill_one(folder: Path, ranks: int, victim: int, after: float, *, launched: bool) -> Killed:
    """Start a run, kill a rank so many seconds after the first step, and watch the others end."""
    metrics = folder.parent / f"metrics-{time.monotonic_ns()}.jsonl"
    command = [sys.executable, "-m", "meshwright.cli", "run", str(folder), "--steps", "100000", "--data", "random"]
    command += ["--metrics", str(metrics), "--checkpoints", str(metrics.with_suffix(""))]
    with tempfile.TemporaryFile("w+") as output:
        started = list(_start(command, ranks, output.fileno(), launched))
        try:
            while not (metrics.exists() and metrics.stat().st_size) and started[0].poll() is None:
                time.sleep(0.05)
            time.sleep(after)
            steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            processes = _ranks_of(started)
            if victim not in processes:
                output.seek(0)
                raise SystemExit(f"the run ended before rank {victim} could be killed:\n{output.read()}")
            os.kill(processes[victim], signal.SIGKILL)
            began = time.monotonic()
            left = [pid for rank, pid in processes.items() if rank != victim]
            while time.monotonic() - began < 3 * LIMIT and (
                any(_alive(pid) for pid in left) or any(p.poll() is None for p in started)
            ):
                time.sleep(0.02)
            seconds = time.monotonic() - began
            output.seek(0)
            return Killed(victim, steps, seconds, output.read(), sum(_alive(pid) for pid in left))
        finally:
            for process in started:
                process.kill()
                process.wait()


def _start(command: list[str], ranks: int, output: int, launched: bool) -> Iterator[subprocess.Popen[bytes]]:
    if launched:
        yield subprocess.Popen(command, stdout=output, stderr=output)
        return
    shared = {**os.environ, **defaults(ranks), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    for rank in range(ranks):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        yield subprocess.Popen(command, stdout=output, stderr=output, env=own)


def _ranks_of(started: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """The process of each rank."""
    if len(started) > 1:
        return {rank: process.pid for rank, process in enumerate(started)}
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and _parent(place) == started[0].pid:
            variables = (place / "environ").read_bytes().split(b"\0")
            rank = next((v for v in variables if v.startswith(b"RANK=")), b"")
            if rank:
                found[int(rank[len(b"RANK=") :])] = int(place.name)
    return found


def _parent(place: Path) -> int:
    try:
        return int((place / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
