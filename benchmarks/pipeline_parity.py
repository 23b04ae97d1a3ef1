"""The parity table of pipelines: every model under every schedule, against one device, in float64.

    python -m benchmarks.pipeline_parity [--write] [--results FILE] [--models T5 ViT] [--schedules zb-v]
                                         [--pipes 4] [--inner "fsdp 2 x tp 2"] [--processes]

All ranks are in one process; with ``--processes`` some cells run on eight processes over gloo. Exits with 1 if a
cell is not within 1e-9. What is done is kept in the file of ``--results``, a line for each cell, and is not done again:
a run that was ended is taken up, and several may share the work by asking for different cells. ``--write`` does
everything and puts it into docs/parity.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.parity import PIPELINES, TARGET, TOLERANCE
from meshwright.compiler.diagnostics import MeshwrightError
from tests.parity.harness import Difference, measure
from tests.parity.on_processes import measure_on_processes
from tests.parity.pipeline_cells import INNER, LAYERS, MODELS, ON_PROCESSES, PIPES, SCHEDULES, pipeline_cell

Result = dict[str, object]
"""Of a cell: its name, its differences or how it fails, and the seconds that it took."""
Row = tuple[str, int, str]
"""A schedule, the number of ranks, the name of the inner plan."""

HEAD = f"""{PIPELINES}

The same for steps that are cut by depth over 2 and 4 ranks, alone and with each stage cut further: AdamW, clipping,
dropout 0.1, unequal numbers of valid tokens in microbatches and ranks, twice as many microbatches as ranks. There are
{", ".join(f"{layers} layers for {stages} stages" for stages, layers in LAYERS.items())}, so that stages differ.
gpt.mw, Qwen3 and T5 tie the head to the embedding. T5 has as many blocks in its encoder as in its decoder, or one more,
and most cuts give a stage that has blocks of both.

`python -m benchmarks.pipeline_parity --write` made this part, in about 20 minutes of one core.
"""


def run(name: str, measured: Callable[[], Difference]) -> Result:
    """What a cell gives: the differences, or why there are none; and the seconds that it took."""
    start, found = time.perf_counter(), Result()
    try:
        found |= dataclasses.asdict(measured())
    except MeshwrightError as refused:
        print(f"{name}: refused\n{refused}", file=sys.stderr)
        found["fails"] = refused.diagnostics[0].code
    except Exception as fault:  # the table shows every cell; the exit code tells
        print(f"{name}: {type(fault).__name__}: {fault}", file=sys.stderr)
        found["fails"] = type(fault).__name__
    return {"cell": name, **found, "seconds": round(time.perf_counter() - start, 1)}


class Results:
    """What is done, kept in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
        self._done: dict[str, Result] = {line["cell"]: line for line in map(json.loads, lines)}

    def of(self, name: str, measured: Callable[[], Difference]) -> Result:
        """The result of a cell, which is run if it is not done yet."""
        if name not in self._done:
            self._done[name] = run(name, measured)
            line = json.dumps(self._done[name])
            print(line, file=sys.stderr, flush=True)
            if self._path:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        return self._done[name]


def worst(result: Result) -> float:
    """The largest difference of any kind; infinite where it failed."""
    if "fails" in result:
        return float("inf")
    return max(float(str(result[name])) for name in ("loss", "norm", "gradients", "weights"))


def text(result: Result) -> str:
    if "fails" in result:
        return f"**{result['fails']}**"
    shown = f"{result['gradients']:.0e} / {result['weights']:.0e}"
    return shown if worst(result) < TOLERANCE else f"**{shown}**"


def table(results: Results, models: Sequence[str], rows: Sequence[Row]) -> tuple[str, list[float]]:
    """A row for each schedule, number of ranks and inner plan, a column for each model; and how far each cell is."""
    # by model, so that what is captured of one serves all its cells
    found: dict[tuple[str, Row], Result] = {}
    for model, row in product(models, rows):
        cell = pipeline_cell(model, *row)
        found[model, row] = results.of(str(cell), partial(measure, cell))
    lines = ["| schedule | ranks | each stage | " + " | ".join(models) + " |", "|---" * (len(models) + 3) + "|"]
    for row in rows:
        lines.append(f"| {' | '.join(map(str, row))} | " + " | ".join(text(found[m, row]) for m in models) + " |")
    far = [worst(result) for result in found.values()]
    return "\n".join([*lines, "", summary(far)]), far


def table_of_processes(results: Results) -> tuple[str, list[float]]:
    """A row for each cell that real processes run."""
    lines, far = ["| eight processes | ranks | each stage | |", "|---|---|---|---|"], []
    for model, *row in ON_PROCESSES:
        cell = pipeline_cell(model, *row)
        with TemporaryDirectory() as folder:
            name = f"on {cell.ranks} processes: {cell}"
            result = results.of(name, partial(measure_on_processes, cell, Path(folder), timeout=600))
        lines.append(f"| {model}, {' | '.join(map(str, row))} | {text(result)} |")
        far.append(worst(result))
    return "\n".join([*lines, "", summary(far)]), far


def summary(far: Sequence[float]) -> str:
    return f"{sum(one < TOLERANCE for one in far)} of {len(far)} cells are within {TOLERANCE:.0e}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="do all and write it into docs/parity.md")
    parser.add_argument("--results", type=Path, help="a file of what is done already, which is added to")
    parser.add_argument("--processes", action="store_true", help="run what real processes run instead")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--pipes", nargs="*", type=int, choices=PIPES, default=PIPES)
    parser.add_argument("--inner", nargs="*", choices=list(INNER), default=list(INNER))
    arguments = parser.parse_args()
    asked = [tuple(getattr(arguments, name)) for name in ("models", "schedules", "pipes", "inner")]
    if arguments.write and asked != [MODELS, SCHEDULES, PIPES, tuple(INNER)]:
        parser.error("--write takes the whole table")
    torch.set_num_threads(1)

    results, parts, far = Results(arguments.results), [], []
    if not arguments.processes or arguments.write:
        rows = list(product(arguments.schedules, arguments.pipes, arguments.inner))
        parts.append(table(results, arguments.models, rows))
    if arguments.processes or arguments.write:
        parts.append(table_of_processes(results))
    for shown, there in parts:
        print(f"{shown}\n")
        far += there
    if arguments.write:
        page = TARGET.read_text(encoding="utf-8").partition(PIPELINES)[0].rstrip()
        TARGET.write_text("\n\n".join([page, HEAD.rstrip(), *(shown for shown, _ in parts)]) + "\n", encoding="utf-8")
    sys.exit(0 if all(one < TOLERANCE for one in far) else 1)


if __name__ == "__main__":
    main()
