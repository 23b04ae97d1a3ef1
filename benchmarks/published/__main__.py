"""Score the cost model on published measurements.

    python -m benchmarks.published [--rows FILE] [--json FILE] [--fit] [--cache FOLDER]

Every row is a model, a cluster, a plan and what was measured of it. Rows that tell too little are listed with the
reason. ``--fit`` fits the devices' constants anew on half of the rows and prints them; those of kernels on rows
without a pipeline.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.published import states
from benchmarks.published.fit import chosen, fit, fit_in_flight, fit_rates, fitted_rows
from benchmarks.published.fitted import FITTED, RATES
from benchmarks.published.predict import clusters, predicted, simulated
from benchmarks.published.programs import Programs, Summary, prepare
from benchmarks.published.reading import OWN, parse_all, read
from benchmarks.published.report import as_json, as_text
from benchmarks.published.rows import Row, Skipped, Unreadable
from benchmarks.published.score import RULE, Scored, chosen_for_fitting
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.summary import RankSummary

CACHE = Path.home() / ".cache" / "meshwright" / "published"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, default=OWN, help="a file of rows (default: those of the project)")
    parser.add_argument("--json", type=Path, help="write everything, row by row, to this file")
    parser.add_argument("--fit", action="store_true", help="fit the devices' constants anew, and score with them")
    parser.add_argument("--fitted-rows", type=Path, help="with --fit: write the ids of the rows that it used")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where programs are kept")
    parser.add_argument("--no-cache", action="store_true", help="compile every program anew, and keep none")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        raw = read(given.rows)
    except Unreadable as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    rows, skipped = parse_all(raw)
    programs = Programs(None if given.no_cache else given.cache)
    priced, more = priced_rows(rows, programs)
    held = states.score(states.states(raw), programs)
    known = {one.row.id for one in held}
    skipped = [s for s in skipped if s.id not in known] + more
    constants = {c.device.name: c.device.efficiency for _, _, c in priced}
    fitted, rates = FITTED, RATES
    if given.fit:
        whole = [(row, summary, on) for row, summary, on in priced if isinstance(summary, RankSummary)]
        constants |= fit(whole, tell)
        rates = fit_rates(priced, constants)
        share = fit_in_flight(priced, rates)
        constants = {name: replace(found, in_flight=share) for name, found in constants.items()}
        used = fitted_rows(whole) | {f"network of {name}": [r.id for r, _, _ in chosen(priced, name)] for name in rates}
        used["pipelines"] = sorted(r.id for r, _, _ in priced if r.layout.pipe > 1 and chosen_for_fitting(r))
        fitted = frozenset(name for names in used.values() for name in names)
        if given.fitted_rows:
            given.fitted_rows.write_text(
                json.dumps({"rule": RULE, "rates": rates, "rows": used}, indent=1) + "\n", encoding="utf-8"
            )
    scored = [
        Scored(row, predicted(simulated(row, summary, cluster, constants, rates)), row.id in fitted)
        for row, summary, cluster in priced
    ]
    for line in as_text(scored, held, skipped, constants):
        print(line)
    if given.json:
        given.json.write_text(json.dumps(as_json(scored, held, skipped, constants), indent=1), encoding="utf-8")
    return 0


def priced_rows(rows: list[Row], programs: Programs) -> tuple[list[tuple[Row, Summary, Cluster]], list[Skipped]]:
    """The rows with their program and cluster, and those that have none."""
    on = clusters(rows)
    skipped = [Skipped(r.id, r.source, c) for r, c in zip(rows, on, strict=True) if isinstance(c, str)]
    placed = [(r, c) for r, c in zip(rows, on, strict=True) if isinstance(c, Cluster)]
    priced = []
    summaries = prepare([r for r, _ in placed], programs, tell)
    for (row, cluster), summary in zip(placed, summaries, strict=True):
        if isinstance(summary, str):
            skipped.append(Skipped(row.id, row.source, summary))
        else:
            priced.append((row, summary, cluster))
    return priced, skipped


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
