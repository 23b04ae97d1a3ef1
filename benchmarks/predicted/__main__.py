"""Predicted against measured steps of 20 plans on local gloo ranks: ``python -m benchmarks.predicted``.

For each number of ranks the machine is calibrated as ``meshwright calibrate`` does (or a cluster file is taken with
``--cluster``), every plan is run by the runtime's executor, and predicted on the calibrated cluster.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.predicted.cases import CASES, Case, model
from benchmarks.predicted.measure import measure
from benchmarks.predicted.report import Result, line, table, totals
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.presets import local
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.prediction_of import predict_rank_program


def run(cases: list[Case], ranks: int, rounds: int, clusters: list[Cluster], keep: Path | None) -> list[Result]:
    """Measure and predict the cases of one number of ranks."""
    programs = [model(case.model).program for case in cases]
    compiled = [compile_step(p, preset(c.plan, p, c.ranks)) for c, p in zip(cases, programs, strict=True)]
    known = next((c for c in clusters if c.ranks == ranks), None)
    machine = measure(ranks, list(zip(cases, compiled, strict=True)), rounds, known)
    cluster = known or _read(machine.cluster, ranks, keep)
    return [
        Result(case, predict_rank_program(c, cluster), measured)
        for case, c, measured in zip(cases, compiled, machine.plans, strict=True)
    ]


def _read(text: str, ranks: int, keep: Path | None) -> Cluster:
    with tempfile.TemporaryDirectory() as folder:
        path = (keep or Path(folder)) / f"local{ranks}.toml"
        path.write_text(text, encoding="utf-8")
        return read_cluster(path, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", type=Path, nargs="*", default=[], help="calibrated files, by number of ranks")
    parser.add_argument("--keep", type=Path, help="a folder for the files that are calibrated")
    parser.add_argument("--ranks", type=int, nargs="*", help="only these numbers of ranks")
    parser.add_argument("--models", nargs="*", help="only the plans for these models")
    parser.add_argument("--rounds", type=int, default=2, help="steps of each plan between two passes")
    parser.add_argument("--memory", action="store_true", help="only memory, which needs no calibration and few steps")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the ranks are forked, which a pool of threads would not survive
    chosen = [c for c in CASES if not given.models or c.model in given.models]
    counts = [n for n in sorted({c.ranks for c in chosen}) if not given.ranks or n in given.ranks]
    clusters = [local(n) for n in counts] if given.memory else [read_cluster(path) for path in given.cluster]
    begun = time.perf_counter()
    results: list[Result] = []
    for ranks in counts:
        cases = [c for c in chosen if c.ranks == ranks]
        found = run(cases, ranks, 0 if given.memory else given.rounds, clusters, given.keep)
        results += found
        if not given.json:
            print("\n".join([*map(line, found), f"{time.perf_counter() - begun:.0f} s so far"]), flush=True)
    if given.json:
        print(
            json.dumps({"plans": [r.row() for r in results], "totals": dataclasses.asdict(totals(results))}, indent=1)
        )
    else:
        print("\n" + table(results))


if __name__ == "__main__":
    main()
