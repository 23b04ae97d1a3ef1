"""The parity table: how far compiled steps are from one device, for every model and plan, in float64.

    python -m benchmarks.parity [--write] [--models Llama ViT] [--plans "fsdp 4"]

Exits with 1 if a cell is not within 1e-9. ``--write`` puts the tables into docs/parity.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from meshwright.compiler.diagnostics import MeshwrightError
from tests.parity.cells import BY_NAME, COLUMNS, VARIANTS, cells_of
from tests.parity.harness import STEPS, Cell, Difference, measure

TOLERANCE = 1e-9
TARGET = Path(__file__).parent.parent / "docs" / "parity.md"
PIPELINES = "## Pipelines"
"""The heading of the part that :mod:`benchmarks.pipeline_parity` writes."""

HEAD = f"""# Parity with one device

Every cell compiles a model for a plan, runs all ranks in one process on the virtual cluster in float64 for {STEPS}
steps, and compares with eager PyTorch on one device. It gives the largest difference of gradients / of updated weights
over all elements, as a share of the largest element of their tensor; the worse of one and of four microbatches.

All: AdamW, clipping by global norm, samples with unequal numbers of valid tokens (one of them with none), 4 query
heads, 2 layers, sizes that 3 ranks do not divide (a vocabulary of 97, an inner width of 40). Llama and Qwen3 have 2
key/value heads; GPT-2, Qwen3, BERT and gpt.mw tie the head to the embedding. BERT's attention has a padding mask made
of data.

`python -m benchmarks.parity --write` made this table.
"""


def run(cells: list[Cell]) -> tuple[str, float]:
    """The text of a cell of the table, and its worst difference (infinite where it failed)."""
    found: list[Difference] = []
    for cell in cells:
        start = time.perf_counter()
        try:
            found.append(measure(cell))
        except MeshwrightError as refused:
            print(f"{cell}: refused\n{refused}", file=sys.stderr)
            return f"refused: {refused.diagnostics[0].code}", float("inf")
        except Exception as fault:  # the table shows every cell; the exit code tells
            print(f"{cell}: {type(fault).__name__}: {fault}", file=sys.stderr)
            return f"fails: {type(fault).__name__}", float("inf")
        print(f"{cell}: {found[-1]} in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    text = f"{max(d.gradients for d in found):.0e} / {max(d.weights for d in found):.0e}"
    worst = max(d.worst for d in found)
    return (text if worst < TOLERANCE else f"**{text}**"), worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/parity.md")
    parser.add_argument("--models", nargs="*", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--plans", nargs="*", choices=list(BY_NAME), default=list(BY_NAME))
    arguments = parser.parse_args()
    whole = arguments.models == list(COLUMNS) and arguments.plans == list(BY_NAME)
    if arguments.write and not whole:
        parser.error("--write takes the whole table")
    torch.set_num_threads(1)

    worst: list[float] = []
    # by model, so that each is captured once and its captured form can then be let go
    texts: dict[tuple[str, str], str] = {}
    for model in arguments.models:
        for plan in arguments.plans:
            texts[model, plan], far = run(cells_of(COLUMNS[model], plan))
            worst.append(far)
    lines = ["| | " + " | ".join(arguments.models) + " |", "|---" * (len(arguments.models) + 1) + "|"]
    lines += [f"| {plan} | " + " | ".join(texts[m, plan] for m in arguments.models) + " |" for plan in arguments.plans]
    lines += ["", "| variant | plan | |", "|---|---|---|"]
    for task, plan in VARIANTS:
        if task.model in arguments.models and plan in arguments.plans:
            text, far = run(cells_of(task, plan))
            worst.append(far)
            lines.append(f"| {task} | {plan} | {text} |")
    table = "\n".join(lines)
    summary = f"{sum(w < TOLERANCE for w in worst)} of {len(worst)} entries are within {TOLERANCE:.0e}."
    print(f"{table}\n\n{summary}")
    if arguments.write:
        rest = "".join(TARGET.read_text(encoding="utf-8").partition(PIPELINES)[1:]) if TARGET.exists() else ""
        TARGET.write_text(f"{HEAD}\n{table}\n\n{summary}\n" + (f"\n{rest}" if rest else ""), encoding="utf-8")
    sys.exit(0 if all(w < TOLERANCE for w in worst) else 1)


if __name__ == "__main__":
    main()
