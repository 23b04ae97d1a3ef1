"""What two ranks have of the outputs of one stage is put together, whatever is done with it over microbatches."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from meshwright.compiler.graph.program import Value
from meshwright.compiler.mesh import MICRO, Mesh, Segment, Sharding
from meshwright.runtime import two_directions
from meshwright.runtime.accumulate import Accumulator, Taken
from meshwright.runtime.mail import VirtualMail
from meshwright.runtime.rendezvous import Rendezvous
from meshwright.runtime.two_directions import exchange

MICROBATCHES = 5
MESH = Mesh((("data", 1),)).with_micro(MICROBATCHES)
WAYS = ((0, 1, 2), (3, 4))
"""The microbatches that each of the two ranks has run."""
MOST, TOTAL, ROWS, BACK = (
    Value("result", "most"),
    Value("gradient", "w"),
    Value("result", "rows"),
    Value("gradient", "v"),
)
SHARDINGS = {
    MOST: Sharding.whole((3,)).owing([(MICRO, "max")]),
    TOTAL: Sharding.whole((3, 2)).owing([(MICRO, "sum")]),
    ROWS: Sharding(((Segment(2 * MICROBATCHES, (MICRO,)),),)),
    BACK: Sharding.whole((4,)).owing([(MICRO, "sum")]),
}


def output(value: Value, microbatch: int) -> Tensor:
    """Of one microbatch; ``TOTAL`` is not contiguous."""
    generator = torch.Generator().manual_seed(microbatch)
    if value == TOTAL:
        return torch.randn(2, 3, generator=generator, dtype=torch.float64).t()
    sizes = {MOST: 3, ROWS: 2, BACK: 4}
    return torch.randn(sizes[value], generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("bucket", [1, 1 << 26])
def test_the_total_is_that_of_all_microbatches(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_directions, "BUCKET", bucket)
    rendezvous = Rendezvous(2)
    accumulators = [{v: Accumulator(s, MESH) for v, s in SHARDINGS.items()} for _ in WAYS]

    def run(rank: int) -> None:
        taken = Taken()
        for value, accumulator in accumulators[rank].items():
            for microbatch in reversed(WAYS[rank]):  # whatever the order in which they were run
                accumulator.add(output(value, microbatch), taken, microbatch)
        gives, gets = ([MOST, TOTAL, ROWS], [BACK]) if rank else ([BACK], [MOST, TOTAL, ROWS])
        exchange(gives, gets, accumulators[rank], MICROBATCHES, 1 - rank, VirtualMail(rank, rendezvous))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for value, rank in ((MOST, 0), (TOTAL, 0), (ROWS, 0), (BACK, 1)):
        found, sharding = accumulators[rank][value].take()
        every = [output(value, microbatch) for microbatch in range(MICROBATCHES)]
        expected = torch.cat(every) if value == ROWS else torch.stack(every)
        if value != ROWS:
            expected = expected.amax(0) if value == MOST else expected.sum(0)
        torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)
        assert MICRO not in sharding.axes and MICRO not in sharding.owed
