"""Predicted memory against what torch's allocator gives out: small models under many plans.

Each plan is run by one of its ranks, whose collectives answer at once. Peaks are in MiB, errors in percent of what was
measured: of the step, and within its graphs.

    python -m benchmarks.allocator [--models GPT-2 Llama gpt.mw] [--plans "fsdp=2" "tp=2,sp,micro=4"]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.memory import memory
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from tests.one_rank import measure
from tests.unit.memory.small_models import batch, model, program

MODELS = ("GPT-2", "Llama", "gpt.mw")
PLANS = (
    "ddp=2", "zero1=2", "zero2=2", "fsdp=2", "tp=2", "tp=2,sp", "fsdp=2,tp=2", "fsdp=2,tp=2,sp", "fsdp=4",
    "ddp=2,micro=4", "fsdp=2,micro=4", "fsdp=2,tp=2,sp,micro=4",
)  # fmt: skip
MIB = 2**20


def compiled(name: str, text: str) -> RankProgram:
    return compile_step(program(name), preset(text, program(name)))


def row(name: str, text: str) -> list[str]:
    rank_program = compiled(name, text)
    predicted = memory(summarize(rank_program))
    measured = measure(rank_program, model(name), batch(name))
    graphs = [_error(predicted.by_graph[g], measured.by_graph[g]) for g in ("micro", "update")]
    peaks = [f"{n / MIB:.2f}" for n in (predicted.peak, measured.peak)]
    return [name, text, *peaks, _error(predicted.peak, measured.peak), *graphs]


def _error(predicted: int, measured: int) -> str:
    return f"{100 * (predicted / measured - 1):+.2f}"


def show(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(r[i]) for r in rows if i < len(r)) for i in range(max(map(len, rows)))]
    for r in rows:
        first, *rest = (
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(r, widths, strict=False))
        )
        print(first, *rest, sep="  ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    given = parser.parse_args()
    rows = [["model", "plan", "predicted", "measured", "error", "micro", "update"]]
    rows += [row(name, text) for name in given.models for text in given.plans]
    show(rows)


if __name__ == "__main__":
    main()
