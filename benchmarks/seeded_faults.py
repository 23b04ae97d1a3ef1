"""Faults put into compiled programs that work: which tier tells them. And correct plans, in which none may be told.

    python -m benchmarks.seeded_faults [--plans] [--only WORD] [--json FILE]

Relations are checked on the program alone; numbers are those of all ranks on the virtual cluster in float64.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from meshwright.compiler.graph.pipeline_program import Compiled
from tests.equivalence.faults import FAULTS
from tests.equivalence.plans import PLANS
from tests.equivalence.tiers import by_numbers, by_relations
from tests.parity.harness import compiled


@dataclass
class Row:
    """What each tier said of one program; '' if it found nothing."""

    name: str
    plan: str
    relations: str
    numbers: str
    seconds_of_relations: float
    seconds_of_numbers: float


def fault_rows(word: str) -> list[Row]:
    """Every fault whose name has the word in it."""
    found = []
    for fault in FAULTS:
        if word in fault.name:
            program = compiled(fault.cell)
            fault.put(program)
            found.append(_row(fault.name, str(fault.cell), program))
            _print(found[-1])
    return found


def plan_rows(word: str) -> list[Row]:
    """Every correct plan whose name has the word in it."""
    found = []
    for cell in PLANS:
        if word in str(cell):
            found.append(_row("", str(cell), compiled(cell)))
            if found[-1].relations or found[-1].numbers:
                _print(found[-1])
    return found


def _row(name: str, plan: str, program: Compiled) -> Row:
    start = time.perf_counter()
    relations = by_relations(program)
    middle = time.perf_counter()
    numbers = by_numbers(program)
    return Row(name, plan, relations, numbers, middle - start, time.perf_counter() - middle)


def _print(row: Row) -> None:
    marks = ["relations" if row.relations else "-", "numbers" if row.numbers else "-"]
    print(f"{marks[0]:<10} {marks[1]:<8} {row.name or row.plan}")
    print(f"    {row.relations or 'nothing found'} | {row.numbers or 'no difference'}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", action="store_true", help="run correct plans, not faults")
    parser.add_argument("--only", default="", help="those whose name has this in it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = plan_rows(args.only) if args.plans else fault_rows(args.only)
    by = {"relations": sum(bool(r.relations) for r in rows), "numbers": sum(bool(r.numbers) for r in rows)}
    either = sum(bool(r.relations or r.numbers) for r in rows)
    what = "correct plans" if args.plans else "faults"
    print(f"{len(rows)} {what}: told by relations {by['relations']}, by numbers {by['numbers']}, by either {either}")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
