"""Measures kernels on this rank's device while all ranks compute, as they do in training."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.compiler.cluster.fitting import Timed
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.summary import Kernel

BUDGET = 0.02
"""Seconds for one kernel of one size in a pass."""
KEPT = 64 << 20
"""Bytes of results that a host keeps while it goes on, as a program keeps what it has computed: memory that the system
has just handed out takes longer to write than memory that is in the caches."""
READ, MOST_COPIES = 16 << 20, 128
"""Bytes of operands that a host takes in turn, and how many at most: what a program multiplies it has computed a while
ago, and other ranks have used the caches since."""


@dataclass(frozen=True)
class Machine:
    """What was measured of a device besides single kernels."""

    memory: int
    copy: float
    """Seconds of a byte between device and host memory."""
    launch: float
    reserve: int


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """The mean seconds of a call; the ranks begin together.

    The mean and not the least: where ranks share cores, the time in which another one computes belongs to it.
    """
    run()
    synchronize(device)
    kept: deque[Tensor] = deque()
    held = 0
    dist.barrier()
    calls, begun = 0, time.perf_counter()
    while not calls or time.perf_counter() - begun < BUDGET:
        # without waiting for each call, so that a GPU's launches overlap as they do in a program
        for _ in range(1 if device.type == "cpu" else 10):
            result = run()
            calls += 1
            if device.type == "cpu" and isinstance(result, Tensor):
                kept.append(result)
                held += result.nbytes
                while held > KEPT and len(kept) > 1:
                    held -= kept.popleft().nbytes
        synchronize(device)
    return (time.perf_counter() - begun) / calls


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_matmuls(device: torch.device) -> list[Timed]:
    """Square and flat products in every dtype that the device is likely to compute in."""
    if device.type == "cpu":
        sides = (64, 128, 256, 512)
        return [_matmul(d, s, device) for d in (torch.float32, torch.float64, torch.bfloat16) for s in _shapes(sides)]
    sides = (512, 1024, 2048, 4096)
    found = [_matmul(d, s, device) for d in (torch.float32, torch.bfloat16, torch.float16) for s in _shapes(sides)]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    found += [_matmul(torch.float32, shape, device, "tf32") for shape in _shapes(sides)]
    torch.set_float32_matmul_precision(before)
    return found


def _shapes(sides: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [(s, s, s) for s in sides] + [(4 * sides[2], sides[1], sides[1]), (sides[2], sides[2], 4 * sides[1])]


def _matmul(dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device, name: str = "") -> Timed:
    m, n, k = shape
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    size = a.element_size()
    copies = min(MOST_COPIES, max(1, READ // (a.nbytes + b.nbytes))) if device.type == "cpu" else 1
    given = cycle([(a.clone(), b.clone()) for _ in range(copies)])
    read, written = size * (m * k + k * n), size * m * n
    kernel = Kernel("mm", "matmul", 2.0 * m * n * k, read, written, name or short_name(dtype), (1, m, n, k))
    return Timed(kernel, seconds_of(lambda: torch.mm(*next(given)), device))


def measure_attention(device: torch.device) -> list[Timed]:
    """Causal attention forward and backward."""
    cpu = device.type == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    shapes = [(16, 8, 64, 32), (2, 4, 128, 32), (1, 4, 512, 64)] if cpu else [(4, 32, 2048, 128), (1, 32, 8192, 128)]
    return [timed for shape in shapes for timed in _attention(shape, dtype, device)]


def _attention(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> list[Timed]:
    b, h, t, c = shape
    q, k, v = (torch.randn(*shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    flops, size = 2.0 * b * h * t * t * c, q.numel() * q.element_size()
    sizes, name = (b, h, t, t, c), short_name(dtype)
    result = _attend(q, k, v)
    gradient = torch.randn_like(result)
    with torch.no_grad():
        there = seconds_of(lambda: _attend(q, k, v), device)
    back = seconds_of(lambda: torch.autograd.grad(result, (q, k, v), gradient, retain_graph=True), device)
    return [
        Timed(Kernel("attention", "attention", flops, 3 * size, size, name, sizes), there),
        Timed(Kernel("attention_backward", "attention", 2.5 * flops, 5 * size, 3 * size, name, sizes), back),
    ]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def measure_elementwise(device: torch.device) -> list[Timed]:
    """Element-wise kernels, a reduction and an optimizer's update over sizes from cache to memory."""
    return [
        Timed(kernel, seconds_of(run, device))
        for elements in ((1 << 14, 1 << 17, 1 << 20, 1 << 22) if device.type == "cpu" else (1 << 20, 1 << 24, 1 << 27))
        for kernel, run in _elementwise(device, elements)
    ]


def _elementwise(device: torch.device, elements: int) -> Iterator[tuple[Kernel, Callable[[], object]]]:
    x, y = torch.randn(elements, device=device), torch.randn(elements, device=device)
    rows = x.view(-1, 256)
    size = 4 * elements
    yield Kernel("add", "elementwise", elements, 2 * size, size), lambda: x + y
    yield Kernel("gelu", "elementwise", elements, size, size), lambda: torch.nn.functional.gelu(x)
    yield Kernel("sum", "reduction", elements, size, size // 256), lambda: rows.sum(1)
    yield Kernel("to", "copy", 0, size, size // 2), lambda: x.bfloat16()
    yield Kernel("lerp", "elementwise", elements, 2 * size, size), lambda: x.lerp_(y, 0.1)


def measure_machine(device: torch.device, ranks_here: int) -> Machine:
    """Memory, launch overhead and host copies."""
    size = 32 << 20 if device.type == "cpu" else 256 << 20
    near = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    far = torch.empty(size, dtype=torch.uint8, device=device)
    near.fill_(1)
    copy = seconds_of(lambda: far.copy_(near, non_blocking=True), device)
    few = torch.ones(16, device=device)
    launch = seconds_of(lambda: _burst(few), device) / 100
    if device.type == "cuda":
        free, memory = torch.cuda.mem_get_info(device)
        reserve = memory - free - torch.cuda.memory_reserved(device)
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here
        reserve = 0
    return Machine(memory, copy / size, launch, max(0, reserve))


def _burst(x: Tensor) -> None:
    for _ in range(100):
        torch.ops.aten.mul.Tensor(x, x)
