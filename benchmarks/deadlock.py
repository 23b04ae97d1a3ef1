"""How long it takes to check that ranks come to an end.

    python -m benchmarks.deadlock [--json FILE]

The programs are those of a schedule with collectives within every pass, as a compiled step has them. Ranks that do the
same are looked at once, except where the table says that all ranks were written out.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.compiler.analysis.graph_steps import Step, Steps
from meshwright.compiler.analysis.rank_writer import RankWriter
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE
from meshwright.compiler.schedules.catalogue import make, modules
from meshwright.compiler.schedules.deadlock import check, check_ranks
from meshwright.compiler.schedules.instructions import Compute
from meshwright.compiler.schedules.lower import UPDATE, programs
from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.symmetry import RankPrograms


@dataclass(frozen=True)
class Case:
    """Ranks of ``mesh`` that run a schedule, with so many collectives over all other axes in a pass."""

    schedule: str
    mesh: Mesh
    microbatches: int
    collectives: int
    written_out: bool = False
    """Whether every rank is looked at."""


@dataclass(frozen=True)
class Row:
    """What was measured; times in seconds."""

    schedule: str
    mesh: str
    microbatches: int
    ranks: int
    written_out: bool
    instructions: int
    seconds: float


CASES = (
    Case("1f1b", Mesh(((PIPE, 8), ("data", 4), ("tensor", 8))), 16, 2),
    Case("1f1b", Mesh(((PIPE, 8), ("data", 4), ("tensor", 8))), 16, 2, written_out=True),
    Case("zb-v", Mesh(((PIPE, 16), ("data", 128), ("tensor", 8))), 64, 16),
    Case("interleaved", Mesh(((PIPE, 16), ("data", 128), ("tensor", 8))), 128, 40),
)


def made(case: Case) -> RankPrograms:
    """The programs of all ranks."""
    request = Request(case.mesh.size(PIPE), case.microbatches, modules()[case.schedule].VIRTUAL)
    axes = tuple(name for name in case.mesh.names if name != PIPE)
    steps: list[Step] = []
    for number in range(case.collectives):
        before = (str(number - 1),) if number else ()
        steps += [Step(str(number), "all_reduce(sum) bf16 1048576", axes[number % len(axes) :][:1], before)]
        steps += [Step(str(number))]
    inside = Steps(tuple(steps), (str(case.collectives - 1),))
    found = []
    messages = programs(make(case.schedule, request), size=lambda made, target: (4096, 4096))
    for pipe, program in enumerate(messages):
        writer = RankWriter(pipe, request.ranks)
        for instruction in program:
            if isinstance(instruction, Compute) and instruction.name != UPDATE:
                writer.run(inside, instruction.name, instruction.needs, instruction.gives)
            else:
                writer.program.append(instruction)
        found.append(tuple(writer.program))
    return RankPrograms(case.mesh, (PIPE,), tuple(found))


def measure(case: Case) -> Row:
    """Check the programs of a case. Raises AssertionError if they do not pass."""
    ranks = made(case)
    looked_at = ranks.everyone() if case.written_out else ranks.programs
    gc.collect()
    begin = time.perf_counter()
    faults = check(looked_at) if case.written_out else check_ranks(ranks)
    seconds = time.perf_counter() - begin
    assert not faults, faults[0].message
    count = sum(map(len, looked_at))
    return Row(case.schedule, str(case.mesh), case.microbatches, case.mesh.ranks, case.written_out, count, seconds)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    print("schedule, mesh, microbatches | ranks | instructions looked at | seconds")
    for case in CASES:
        row = measure(case)
        rows.append(asdict(row))
        ranks = f"{row.ranks}, written out" if row.written_out else f"{row.ranks}"
        what = f"{row.schedule}, {row.mesh}, {row.microbatches}"
        print(f"{what} | {ranks} | {row.instructions} | {row.seconds:.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
