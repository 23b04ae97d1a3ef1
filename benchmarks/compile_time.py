"""Capture and compile time of Llama at the shape of 8B parameters, on the meta device: no weights are made.

    python -m benchmarks.compile_time [--layers 2 32] [--plans ddp=8 fsdp=8 fsdp=8,tp=8] [--time 4096] [--batch 8]

Every number of layers is measured in a process of its own, so that the peak memory is its own.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as multiprocessing
import transformers

from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture


@dataclass
class Measured:
    """Seconds, nodes of the captured graphs, and the peak resident size in MiB at the end."""

    capture: float = 0.0
    nodes: int = 0
    compile: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0


def llama_8b(layers: int, time_steps: int) -> transformers.LlamaForCausalLM:
    """Llama 3 of 8B parameters, of which ``layers`` layers; bf16, on the meta device."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=time_steps,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()


def nodes(program: StepProgram) -> int:
    return sum(len(g.module.graph.nodes) for g in (program.prologue, program.micro, program.update))


def work(layers: int, plans: list[str], batch_size: int, time_steps: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    found = Measured()
    # what torch imports and builds on first use is no property of the model
    tiny = torch.nn.Linear(2, 2)
    capture(tiny, torch.ones(2, 2), torch.optim.AdamW(tiny.parameters()), loss=lambda output, batch: output.sum())

    start = time.perf_counter()
    model = llama_8b(layers, time_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.zeros(batch_size, time_steps, dtype=torch.int64, device="meta")
    program = capture(model, {"input_ids": tokens, "labels": tokens}, optimizer, clip=1.0)
    found.capture = time.perf_counter() - start
    found.nodes = nodes(program)
    for plan in plans:
        start = time.perf_counter()
        compile_step(program, preset(plan, program))
        found.compile[plan] = time.perf_counter() - start
    found.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    pipe.send(found)


def measure(layers: int, plans: list[str], batch_size: int, time_steps: int) -> Measured:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(layers, plans, batch_size, time_steps, theirs))
    process.start()
    theirs.close()
    found: Measured = ours.recv()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 32])
    parser.add_argument("--plans", nargs="*", default=["ddp=8", "fsdp=8", "fsdp=8,tp=8"])
    parser.add_argument("--batch", type=int, default=8, help="samples of the global batch")
    parser.add_argument("--time", type=int, default=4096, help="tokens of a sample")
    arguments = parser.parse_args()
    print(
        f"\nLlama of 8B shape, bf16, meta device, global batch {arguments.batch} x {arguments.time} tokens, AdamW,"
        " clip; one thread; seconds\n"
    )
    print(
        "| layers | capture | nodes | " + " | ".join(f"compile {p}" for p in arguments.plans) + " | peak memory MiB |"
    )
    print("|---" * (4 + len(arguments.plans)) + "|")
    for layers in arguments.layers:
        got = measure(layers, arguments.plans, arguments.batch, arguments.time)
        compiled = " | ".join(f"{got.compile[p]:.1f}" for p in arguments.plans)
        print(f"| {layers} | {got.capture:.1f} | {got.nodes} | {compiled} | {got.memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()
