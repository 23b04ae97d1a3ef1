"""Measures collectives between ranks, all groups at the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from meshwright.compiler.cluster.fitting import Sent
from meshwright.compiler.summary import MessageKind
from meshwright.runtime.measure_kernels import synchronize
from meshwright.runtime.measure_memory import most_taken, still_taken
from meshwright.runtime.moved import moved
from meshwright.runtime.torch_distributed import all_gather_single, reduce_scatter_single

BUDGET = 0.02
"""Seconds for one collective of one size in a pass."""
SIZES = (1 << 12, 1 << 17, 1 << 21, 1 << 24)
"""Payloads on CPUs; on GPUs they are 16 times larger from the second on."""
MOST_CALLS = 8
SIDE = 512
"""Of the product that is computed between messages."""
AT_ONCE, PAYLOAD = 4, 1 << 21
"""Messages that run beside kernels, and their payload on CPUs."""

Begin = Callable[[bool], object]


@dataclass(frozen=True)
class Beside:
    """Seconds of messages, of kernels, and of both together."""

    messages: float
    kernels: float
    together: float

    @property
    def longer(self) -> float:
        """What the kernels take longer with the messages; a part of what those take alone, at least."""
        return max(self.messages / 4, self.together - self.kernels)

    @property
    def hidden(self) -> float:
        """The share of the messages by which the kernels do not take longer."""
        return (self.messages + self.kernels - self.together) / min(self.messages, self.kernels)


def measure_collectives(
    group: Sequence[int], handle: dist.ProcessGroup, device: torch.device, *, memory: bool
) -> list[tuple[Sent, Beside]]:
    """All kinds over this rank's group, while the other ranks do the same in theirs; with the ``memory`` that the
    library takes for the largest."""
    sizes = SIZES if device.type == "cpu" else (SIZES[0], *(16 * s for s in SIZES[1:]))
    return [
        _sent(Sent(kind, len(group), payload, 0.0), begin, device, memory and payload == sizes[-1])
        for payload in sizes
        for kind, begin in _collectives(len(group), handle, device, payload)
    ]


def _sent(sent: Sent, begin: Begin, device: torch.device, memory: bool) -> tuple[Sent, Beside]:
    beside = _between_kernels(lambda: begin(False), device)
    if not memory:
        return sent, beside
    taken = most_taken(lambda: begin(False), device)
    held = still_taken(lambda: _moved(begin), device, _wait)
    return replace(sent, taken=taken, passing=max(0, taken - held)), beside


def _moved(begin: Begin) -> object:
    """A message whose bytes have moved, and that nobody has waited for."""
    work = begin(True)
    if isinstance(work, dist.Work):
        moved(work)
    return work


def _wait(work: object) -> None:
    """A message that is not waited for is never finished, and its memory is not the library's to keep."""
    if isinstance(work, dist.Work):
        work.wait()


def _collectives(
    members: int, handle: dist.ProcessGroup, device: torch.device, payload: int
) -> list[tuple[MessageKind, Begin]]:
    """How each is begun: to be waited for later, or not."""
    whole = torch.ones(payload // 4 // members * members, device=device)
    part = torch.ones(whole.numel() // members, device=device)
    other = torch.empty_like(whole)
    return [
        ("all-reduce", lambda later: dist.all_reduce(whole.fill_(1.0), group=handle, async_op=later)),
        ("all-gather", lambda later: all_gather_single(whole, part, group=handle, async_op=later)),
        ("reduce-scatter", lambda later: reduce_scatter_single(part, whole, group=handle, async_op=later)),
        ("all-to-all", lambda later: dist.all_to_all_single(other, whole, group=handle, async_op=later)),
    ]


def _between_kernels(run: Callable[[], object], device: torch.device) -> Beside:
    """A call between kernels. All ranks call equally often, at most as the slowest needs for the budget.

    A rank that comes to a message has to wait for the others to come to it, longest where ranks share cores; those that
    do nothing but send are all there.
    """
    run()
    once = torch.tensor(_window(run, device, 1), device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    calls = min(MOST_CALLS, max(1, int(BUDGET / once.item())))
    work = computation(device)
    return Beside(once.item(), _window(work, device, calls), _window(lambda: (work(), run()), device, calls))


def computation(device: torch.device) -> Callable[[], object]:
    """A product that takes about as long as what a program computes between two messages."""
    x = torch.randn(SIDE, SIDE, device=device)
    return lambda: x @ x


def measure_hidden(members: int, handle: dist.ProcessGroup, device: torch.device) -> Beside:
    """Messages that run beside kernels."""
    begin = _collectives(members, handle, device, PAYLOAD if device.type == "cpu" else 16 * PAYLOAD)[1][1]
    work = computation(device)

    def send() -> None:
        for message in [begin(True) for _ in range(AT_ONCE)]:
            assert isinstance(message, dist.Work)
            message.wait()

    def both(products: int) -> None:
        messages = [begin(True) for _ in range(AT_ONCE)]
        for _ in range(products):
            work()
        for message in messages:
            assert isinstance(message, dist.Work)
            message.wait()

    send()
    times = torch.tensor([_window(send, device, 1), _window(work, device, MOST_CALLS)], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    products = max(1, math.ceil(times[0].item() / times[1].item()))
    sending, computing = _window(send, device, 1), _window(work, device, products) * products
    together = _window(lambda: both(products), device, 1)
    return Beside(sending, computing, together)


def _window(run: Callable[[], object], device: torch.device, calls: int) -> float:
    synchronize(device)
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return (time.perf_counter() - begun) / calls
