"""What sums cost in half precision, measured: in one process, in a given order, and by real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.compiler.graph import collectives
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.numerics.error_model import Addends, Order
from meshwright.runtime.communicator import ProcessCommunicator
from tests.unit.numerics.known_sums import relative_error, samples

WIDTH = 8192
KINDS = ("all_reduce", "reduce_scatter", "reduce_scatter_wide")


def one_after_the_other(x: Tensor) -> Tensor:
    total = x[0].clone()
    for addend in x[1:]:
        total += addend
    return total


def pairwise(x: Tensor) -> Tensor:
    while len(x) > 1:
        even = len(x) // 2 * 2
        x = torch.cat([x[0:even:2] + x[1:even:2], x[even:]])
    return x[0]


def rounded_once(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.float32).to(x.dtype)


ORDERS: dict[Order, Callable[[Tensor], Tensor]] = {
    "ring": one_after_the_other,
    "tree": pairwise,
    "all-to-all": rounded_once,
}


def simulated(count: int, addends: Addends, order: Order, dtype: torch.dtype, width: int = WIDTH) -> float:
    """The relative error of sums of so many numbers of the dtype in an order."""
    x = samples(count, width, addends, dtype)
    return relative_error(ORDERS[order](x.to(dtype)), x)


def by_gloo(addends: Addends, dtype: torch.dtype) -> dict[str, float]:
    """On a rank that ``run_ranks`` has started: the relative errors of sums over all ranks, by function."""
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    here = ProcessCommunicator(Mesh((("data", count),)), 1, [("data",)])
    x = samples(count, WIDTH, addends, dtype)
    mine = x[rank].to(dtype)
    part = slice(rank * WIDTH // count, (rank + 1) * WIDTH // count)
    with collectives.use(here):
        whole = collectives.all_reduce(mine, ("data",))
        cut = collectives.reduce_scatter(mine, 0, ("data",))
        wide = collectives.reduce_scatter_wide(mine, 0, ("data",), dtype)
    dist.destroy_process_group()
    found = relative_error(whole, x), relative_error(cut, x[:, part]), relative_error(wide, x[:, part])
    return dict(zip(KINDS, found, strict=True))
