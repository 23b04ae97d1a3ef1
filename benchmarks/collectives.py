"""Predicted over measured seconds of published collectives: ``python -m benchmarks.collectives [--json]``.

The measurements are in ``tests/data/collectives.json`` (each row with its source); a file of the same form can be given
with ``--rows``. Rows marked ``fitted`` have set constants of the device files, the others check them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.collectives import message_cost
from meshwright.compiler.mesh import Mesh

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "tests" / "data" / "collectives.json"
LARGE = 64 << 20
"""Bytes from which a payload counts as large (a layer's weights or gradients)."""


@dataclass(frozen=True)
class Scored:
    row: dict[str, Any]
    ratios: tuple[tuple[int, float], ...]
    """Payload, and predicted over measured seconds."""

    def errors(self, least: int = 0) -> list[float]:
        return [abs(ratio - 1) for size, ratio in self.ratios if size >= least]


def score(rows: Path = ROWS) -> list[Scored]:
    """Every row with its ratios."""
    scored = []
    for row in json.loads(rows.read_text(encoding="utf-8")):
        place = ROOT / row["cluster"] if row["cluster"].endswith(".toml") else row["cluster"]
        cluster = read_cluster(place)
        mesh = Mesh((("all", row["devices"]),))
        ratios = tuple(
            (size, message_cost(cluster, mesh, ("all",), row["kind"], size).seconds / measured)
            for size, measured in row["points"]
        )
        scored.append(Scored(row, ratios))
    return scored


def summary(scored: list[Scored], *, fitted: bool, least: int = 0) -> dict[str, float]:
    """Median and 90th percentile of the error over all points of at least ``least`` bytes."""
    errors = sorted(e for s in scored if s.row["fitted"] == fitted for e in s.errors(least))
    return {
        "points": len(errors),
        "median": statistics.median(errors),
        "p90": errors[int(0.9 * (len(errors) - 1))],
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=Path, default=ROWS)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    scored = score(given.rows)
    kinds = {f"{'fitted' if f else 'not fitted'}, {'64 MiB and more' if least else 'all sizes'}": (f, least)
             for f in (True, False) for least in (0, LARGE)}  # fmt: skip
    totals = {name: summary(scored, fitted=f, least=least) for name, (f, least) in kinds.items()}
    if given.json:
        rows = [{**s.row, "points": None, "ratios": s.ratios} for s in scored]
        print(json.dumps({"rows": rows, "totals": totals}, indent=1))
        return
    print(f"{'predicted / measured seconds':74}  by payload, small to large")
    for s in scored:
        mark = "*" if s.row["fitted"] else " "
        print(f"{mark} {s.row['name'][:72]:72}  {' '.join(f'{ratio:.2f}' for _, ratio in s.ratios)}")
    print("\n* rows that have set constants\n")
    for name, total in totals.items():
        print(
            f"{name:28} {total['points']:4.0f} points: median {total['median']:.1%}, 90th percentile {total['p90']:.1%}"
        )


if __name__ == "__main__":
    main()
