"""The published zero-bubble rows, simulated: how long ranks wait, and how fast schedules are against one another.

    python -m benchmarks.zero_bubble [--rows FILE] [--json FILE]

Every row of "Zero Bubble Pipeline Parallelism" (Qi et al. 2023) that tells the times of its passes becomes a request to
the schedule that it names. Two things are compared:

- *Bubble rates*, which the authors computed from those times: messages take their time, and hide behind passes.
- *Throughput*, which they measured, relative to the other schedules of the same model and microbatches. The launch
  script that they published passes ``--no-overlap-p2p-communication``: a rank that hands a message over does not
  compute. An interleaved schedule hands over as many times more as a rank has stages, which costs it much of its gain.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise, permutations
from pathlib import Path
from typing import Any

from benchmarks.published.fields import optional, part
from benchmarks.published.reading import OWN, read
from benchmarks.published.rows import Unreadable
from meshwright.compiler.schedules.catalogue import make, modules
from meshwright.compiler.schedules.request import Costs, Request
from meshwright.compiler.schedules.simulate import simulate
from meshwright.compiler.schedules.table import Schedule

BASE = "1F1B"
"""The schedule that throughput is told relative to."""
NAMED = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "ZB-V": "zb-v"}
OURS = NAMED | {"ZB-1p": "list", "ZB-2p": "list"}
"""What the schedules are called here."""
MEMORY = {"ZB-1p": 1, "ZB-2p": 2}
"""What the searched schedules may hold, in activations of a stage for each rank of the pipeline."""


@dataclass(frozen=True)
class Row:
    """A pipeline as published. Times are milliseconds, of all stages of a rank together."""

    id: str
    model: str
    schedule: str
    ranks: int
    microbatches: int
    virtual: int
    samples: int
    """Of a microbatch."""
    times: tuple[float, float, float]
    send: float
    kept: float
    bubble: float
    throughput: float | None
    """Samples a second on each device."""

    @property
    def cell(self) -> tuple[str, int, int]:
        """Rows of one cell differ in their schedule alone."""
        return self.model, self.ranks, self.microbatches

    @property
    def synchronised(self) -> bool:
        """Whether ranks wait for one another before the update; the zero-bubble runs validate it afterwards."""
        return not self.schedule.startswith("ZB")


@dataclass(frozen=True)
class Outcome:
    """A row, simulated. ``relative``: throughput over that of 1F1B, as published and as simulated; None without one."""

    row: Row
    bubble: float
    throughput: float
    relative: tuple[float, float] | None = None


def rows(raw: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows that tell the times of their passes and name a schedule that there is."""
    found = (_row(one) for one in raw if part(part(one, "extra"), "profiled_ms"))
    return [row for row in found if row is not None]


def _row(raw: Mapping[str, Any]) -> Row | None:
    model, parallel, extra = part(raw, "model"), part(raw, "parallel"), part(raw, "extra")
    times, schedule = part(extra, "profiled_ms"), str(extra.get("schedule"))
    bubble, width = optional(extra, "bubble_rate"), optional(model, "hidden")
    if schedule not in OURS or bubble is None or width is None:
        return None
    samples = int(parallel["microbatch"])
    of_attention = 5 * model["heads"] * model["seq_len"] / width
    return Row(
        id=str(raw["id"]),
        model=str(model["name"]),
        schedule=schedule,
        ranks=int(parallel["pp"]),
        microbatches=int(parallel["global_batch"]) // samples // int(parallel["dp"]),
        virtual=int(parallel["vpp"] or modules()[OURS[schedule]].VIRTUAL),
        samples=samples,
        times=(float(times["TF"]), float(times["TB"]), float(times["TW"])),
        send=float(times["Tcomm"]),
        # of the 34 + 5 a s / h bytes that a layer keeps for every element of its output (Korthikanti et al. 2022),
        # the gradients of the weights need 32
        kept=32 / (34 + of_attention),
        bubble=bubble,
        throughput=optional(extra, "samples_per_gpu_s"),
    )


def simulated(row: Row) -> Outcome:
    """The bubble rate with messages that hide, and the throughput with messages for which the sender stands still."""
    forward, input_, weight = (time / row.virtual for time in row.times)
    costs = Costs(forward, input_, weight, row.send, kept=row.kept)
    memory = float(MEMORY[row.schedule] * row.ranks) if row.schedule in MEMORY else None
    request = Request(row.ranks, row.microbatches, row.virtual, costs, memory, row.synchronised)
    schedule = make(OURS[row.schedule], request)
    bubble = 1 - row.microbatches * sum(row.times) / _milliseconds(row, schedule, costs)
    runs = _milliseconds(row, schedule, handing_over(schedule, costs))
    return Outcome(row, bubble, 1000 * row.samples * row.microbatches / row.ranks / runs)


def _milliseconds(row: Row, schedule: Schedule, costs: Costs) -> float:
    run = simulate(schedule, costs)
    return run.seconds if row.synchronised else run.span


def handing_over(schedule: Schedule, costs: Costs) -> Costs:
    """The costs where a pass ends only when what it sends has been handed over."""
    (ranks,) = schedule.placement
    borders = [0.0 if here == there else costs.send for here, there in pairwise(ranks)]
    down, up = [*borders, 0.0], [0.0, *borders]
    stages = ((costs.of(s), down[s], up[s]) for s in range(schedule.stages))
    return Costs(kept=costs.kept, stages=tuple((f + d, i + u, w) for (f, i, w), d, u in stages))


def outcomes(found: Iterable[Row]) -> list[Outcome]:
    """All rows, simulated, with their throughput relative to 1F1B in the same cell."""
    done = []
    for _, cell in groupby(sorted(found, key=lambda r: (r.ranks, *r.cell)), key=lambda r: r.cell):
        runs = [simulated(row) for row in cell]
        base = next((one for one in runs if one.row.schedule == BASE and one.row.throughput), None)
        for one in runs:
            published = one.row.throughput
            relative = None
            if base is not None and base.row.throughput and published:
                relative = published / base.row.throughput, one.throughput / base.throughput
            done.append(Outcome(one.row, one.bubble, one.throughput, relative))
    return done


def apart(done: Iterable[Outcome]) -> list[tuple[Row, Row, float]]:
    """For each two schedules of a cell, by which share the throughput of the first over that of the second is off."""
    measured = (one for one in done if one.row.throughput)
    found = []
    for _, cell in groupby(measured, key=lambda one: one.row.cell):
        for one, other in permutations(cell, 2):
            published = (one.row.throughput or 0.0) / (other.row.throughput or 1.0)
            found.append((one.row, other.row, one.throughput / other.throughput / published - 1))
    return found


def lines(done: list[Outcome]) -> Iterable[str]:
    """The table, and how far off the worst is."""
    yield "model      stages  microbatches  schedule    bubble rate           throughput over 1F1B"
    yield "                                          published  simulated   published  simulated"
    for one in done:
        row = one.row
        text = f"{row.model:<9} {row.ranks:>7} {row.microbatches:>13}  {row.schedule:<8}"
        text += f" {100 * row.bubble:>9.2f} % {100 * one.bubble:>8.2f} %"
        yield text + ("" if one.relative is None else f" {one.relative[0]:>10.3f} {one.relative[1]:>10.3f}")
    pairs = apart(done)
    if done:
        yield ""
        yield f"bubble rate: at most {100 * max(abs(o.bubble - o.row.bubble) for o in done):.2f} points off"
    if pairs:
        first, second, off = max(pairs, key=lambda pair: abs(pair[2]))
        where = f"{first.schedule} over {second.schedule}, {first.model}, {first.microbatches} microbatches"
        yield f"throughput between two schedules: at most {100 * abs(off):.2f} % off ({where})"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zero_bubble", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rows", type=Path, default=OWN, help="a file of rows (default: those of the project)")
    parser.add_argument("--json", type=Path, help="write everything, row by row, to this file")
    given = parser.parse_args(arguments)
    try:
        done = outcomes(rows(read(given.rows)))
    except Unreadable as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    for line in lines(done):
        print(line)
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in done], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
