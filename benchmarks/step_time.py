"""Step time and peak memory of compiled steps against plain PyTorch DDP and FSDP2: same model, batch, ranks.

Every contender has its own processes, all alive at once; one at a time is told to run a few steps, in turn,
round after round, so that whatever else the machine does meets all alike. Time is the median over the rounds,
memory the highest resident size during the steps less what a warm process without the model takes, of the largest rank.

    python -m benchmarks.step_time [--ranks 4] [--rounds 5] [--steps 2]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import pathlib
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import meshwright

LAYERS, WIDTH, INNER, HEADS, KEY_VALUE_HEADS, VOCABULARY, TIME, BATCH = 6, 384, 1024, 8, 4, 4096, 64, 16
CLIP = 1.0
Step = Callable[[dict[str, Tensor]], float]


def build_model(width: int = WIDTH, layers: int = LAYERS) -> nn.Module:
    """A small Llama in float32, the same weights in every process."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        max_position_embeddings=TIME,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def build_batch(number: int) -> dict[str, Tensor]:
    """The whole global batch of one step."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randint(VOCABULARY, (BATCH, TIME), generator=generator)
    return {"input_ids": inputs, "labels": inputs}


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW as torch has it on a CPU by default: one parameter after another, neither foreach nor fused."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, foreach=False, fused=False)


def own_part(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    rank, count = dist.get_rank(), dist.get_world_size()
    return {name: x.chunk(count)[rank] for name, x in batch.items()}


def ddp() -> Step:
    model = nn.parallel.DistributedDataParallel(build_model())
    return eager(model, model.parameters())


def fsdp2() -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = build_model()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return eager(model, model.parameters())


def eager(model: nn.Module, parameters: Any) -> Step:
    parameters = list(parameters)
    optimizer = build_optimizer(parameters)

    def step(batch: dict[str, Tensor]) -> float:
        optimizer.zero_grad()
        loss = model(**own_part(batch)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP, foreach=False)
        optimizer.step()
        # every sample has the same number of tokens here, so the mean of the means is the mean
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step


def compiled(plan: str) -> Callable[[], Step]:
    def build() -> Step:
        model = build_model()
        step = meshwright.parallelize(
            model, optimizer=build_optimizer(model.parameters()), batch=build_batch(0), plan=plan, clip=CLIP
        )
        del model
        return lambda batch: float(step(batch))

    return build


CONTENDERS: dict[str, Callable[[], Step]] = {
    "PyTorch DDP": ddp,
    "Meshwright ddp": compiled("ddp"),
    "Meshwright ddp,prefetch": compiled("ddp,prefetch"),
    "PyTorch FSDP2": fsdp2,
    "Meshwright fsdp": compiled("fsdp"),
    "Meshwright fsdp,prefetch": compiled("fsdp,prefetch"),
}
BASELINE = {
    name: "PyTorch DDP" if "ddp" in name else "PyTorch FSDP2" for name in CONTENDERS if name.startswith("Meshwright")
}


def resident(field: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process in MiB."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"the kernel does not tell {field}")


def warm_up() -> None:
    """A tiny eager step, so that what torch loads on first use counts for no contender."""
    model = build_model(width=HEADS * 2)
    optimizer = build_optimizer(model.parameters())
    model(**build_batch(0)).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=False)
    optimizer.step()
    dist.all_reduce(torch.zeros(1))


def settle() -> None:
    """Give freed memory back to the system and begin a new high-water mark."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def work(module: str, name: str, rank: int, ranks: int, port: int, pipe: Connection) -> None:
    """One process of a contender of a module: builds its step, then runs as many as it is told, until told 0."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warm_up()
    settle()
    floor = resident("VmRSS")
    step: Step = importlib.import_module(module).CONTENDERS[name]()
    loss = step(build_batch(0))
    settle()
    pipe.send("ready")
    number = 1
    while count := pipe.recv():
        batches = [build_batch(number + i) for i in range(count)]
        dist.barrier()
        start = time.perf_counter()
        for batch in batches:
            loss = step(batch)
        seconds = (time.perf_counter() - start) / count
        number += count
        pipe.send((seconds, loss))
    pipe.send(resident("VmHWM") - floor)
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Measured:
    seconds: float
    memory: float
    loss: float


def measure(module: str, ranks: int, rounds: int, steps: int, names: list[str]) -> dict[str, Measured]:
    """Run contenders of a module in turn and return their figures."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, list[Connection]] = {name: [] for name in names}
    processes = []
    for index, name in enumerate(names):
        port = free_port()
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(module, name, rank, ranks, port, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes[name].append(ours)
            processes.append(process)
        for pipe in pipes[name]:
            pipe.recv()
        print(f"started {index + 1} of {len(names)}: {name}", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for _ in range(rounds):
        for name in names:
            for pipe in pipes[name]:
                pipe.send(steps)
            answers = [pipe.recv() for pipe in pipes[name]]
            seconds[name].append(max(s for s, _ in answers))
            losses[name] = answers[0][1]
    result = {}
    for name in names:
        for pipe in pipes[name]:
            pipe.send(0)
        memory = max(pipe.recv() for pipe in pipes[name])
        result[name] = Measured(statistics.median(seconds[name]), memory, losses[name])
    for process in processes:
        process.join()
    return result


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def table(found: dict[str, Measured], baseline: Mapping[str, str]) -> str:
    """Markdown; contenders that ``baseline`` names are compared with another."""
    rows = ["| step | ms | against | peak memory MiB | against | loss |", "|---|---|---|---|---|---|"]
    for name, got in found.items():
        base = found.get(baseline.get(name, ""))
        time_ratio = f"{got.seconds / base.seconds:.2f} x" if base else ""
        memory_ratio = f"{got.memory / base.memory:.2f} x" if base else ""
        rows.append(
            f"| {name} | {got.seconds * 1e3:.0f} | {time_ratio} | {got.memory:.0f} | {memory_ratio} | {got.loss:.6f} |"
        )
    return "\n".join(rows)


def run(module: str, description: str | None, baseline: Mapping[str, str], model: Callable[[int], str]) -> None:
    """Read the command line, measure contenders of a module and print their table. ``model``: in words, by ranks."""
    contenders = list(importlib.import_module(module).CONTENDERS)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per round and contender")
    parser.add_argument("--only", nargs="*", choices=contenders, default=contenders)
    given = parser.parse_args()
    found = measure(module, given.ranks, given.rounds, given.steps, given.only)
    print(
        f"\nLlama of {model(given.ranks)}, float32; AdamW (no foreach, not fused), clip {CLIP}; {given.ranks} gloo"
        f" processes of 1 thread each on {os.cpu_count()} cores; median of {given.rounds} rounds of"
        f" {given.steps} steps\n"
    )
    print(table(found, baseline))


def in_words(ranks: int) -> str:
    parameters = sum(p.numel() for p in build_model().parameters())
    return f"{LAYERS} layers, width {WIDTH}, {parameters / 1e6:.1f} M parameters; batch {BATCH} x {TIME} tokens"


def main() -> None:
    run("benchmarks.step_time", __doc__, BASELINE, in_words)


if __name__ == "__main__":
    main()
