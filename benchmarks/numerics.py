"""Errors of sums in half precision: measured beside predicted.

    python -m benchmarks.numerics [--gloo 4,8] [--most 1024]

Simulated: numbers of the dtype are added in one process, one after the other (as a ring does), pairwise (a tree), or in
fp32 (an all-to-all and a sum). Measured over gloo: the same sums by so many processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch

from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.numerics.error_model import Addends, Order, error_of_sum, one_rounding
from tests.parallel.measured_sums import ORDERS, by_gloo, simulated
from tests.parallel.ranks import run_ranks, values

ADDENDS: tuple[Addends, ...] = get_args(Addends)
DTYPES = (torch.bfloat16, torch.float16)
GLOO: dict[str, Order] = {"all_reduce": "ring", "reduce_scatter": "ring", "reduce_scatter_wide": "all-to-all"}


@dataclass(frozen=True)
class Row:
    """One sum. Errors are relative, root mean square."""

    where: str
    dtype: str
    addends: Addends
    order: Order
    count: int
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    def line(self) -> str:
        unit = one_rounding(self.dtype)
        return (
            f"{self.where:20} {self.dtype:5} {self.addends:13} {self.order:11} {self.count:5} "
            f"{self.measured / unit:9.2f} {self.predicted / unit:9.2f} {self.ratio:6.2f}"
        )


def simulated_rows(most: int = 1024) -> Iterator[Row]:
    """Sums of 2 to ``most`` addends."""
    counts = [n for n in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024) if n <= most]
    for dtype in DTYPES:
        name = short_name(dtype)
        for addends in ADDENDS:
            for order in ORDERS:
                for n in counts:
                    error = simulated(n, addends, order, dtype)
                    yield Row("simulated", name, addends, order, n, error, error_of_sum(name, n, addends, order))


def gloo_rows(ranks: int) -> Iterator[Row]:
    """Sums over so many processes; the worst rank counts."""
    for dtype in DTYPES:
        name = short_name(dtype)
        for addends in ADDENDS:
            found = values(run_ranks(ranks, by_gloo, addends, dtype, timeout=120))
            for kind, order in GLOO.items():
                predicted = error_of_sum(name, ranks, addends, order)
                yield Row(f"gloo {kind}", name, addends, order, ranks, max(f[kind] for f in found), predicted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gloo", default="4,8", help="numbers of processes; empty: none")
    parser.add_argument("--most", type=int, default=1024, help="the most simulated addends")
    options = parser.parse_args()
    print(f"{'':20} {'dtype':5} {'addends':13} {'order':11} {'n':>5} {'measured':>9} {'predicted':>9} {'ratio':>6}")
    rows = []
    for row in simulated_rows(options.most):
        rows.append(row)
        print(row.line())
    for ranks in filter(None, options.gloo.split(",")):
        for row in gloo_rows(int(ranks)):
            rows.append(row)
            print(row.line(), flush=True)
    low, high = min(r.ratio for r in rows), max(r.ratio for r in rows)
    print(f"errors in roundings; predicted / measured: {low:.2f} to {high:.2f} in {len(rows)} sums")


if __name__ == "__main__":
    main()
