"""How long planning takes, and with how much memory: Llama 3.1 of 8B, 70B and 405B, and ``examples/gpt.mw``, on H100.

    python -m benchmarks.planning [--models 8B 70B 405B gpt.mw] [--ranks 8 64 512 4096 16384] [--layers N] [--json FILE]

Each model is captured once, in a process of its own, so that the peak memory is its own; then a plan is chosen for each
number of ranks. ``--layers 2 126`` measures the growth with depth. Models are on the meta device: no weights are made.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
import transformers

from meshwright.compiler.analysis.blocks import Folded
from meshwright.compiler.analysis.stand_ins import COPIES
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.plan import Precision
from meshwright.compiler.prediction import Execution
from meshwright.compiler.search.limits import Limits
from meshwright.frontend.capture.shallow import capture_folded
from meshwright.frontend.source import load_source
from meshwright.planning import plan_folded

LLAMA = {"8B": (32, 4096, 32, 14336), "70B": (80, 8192, 64, 28672), "405B": (126, 16384, 128, 53248)}
"""Layers, width, heads, inner width; 8 key/value heads and a vocabulary of 128,256 in all."""
SAMPLES, TIME = 2048, 4096
MIXED = Precision("bf16", "fp32", "fp32")
GPT = Path(__file__).parents[1] / "examples" / "gpt.mw"


@dataclass
class Row:
    """One choice. Seconds, and the peak resident size of the process in MiB."""

    model: str
    layers: int
    ranks: int
    capture: float
    search: float = 0.0
    priced: int = 0
    considered: int = 0
    plan: str = ""
    step: float = 0.0
    mfu: float = 0.0
    memory: float = 0.0


def captured(model: str, layers: int | None) -> tuple[Folded, Precision, int]:
    """The step of a model, with so many layers if a number is given; its precision, its layers."""
    if model == "gpt.mw":
        changed = {"batch": 16384, **({"layers": layers} if layers else {})}
        source = load_source(str(GPT), changed)
        return source.capture_folded(), source.precision, layers or 4
    depth, width, heads, inner = LLAMA[model]
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=TIME,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config).train()
        tokens = torch.empty(SAMPLES, TIME, dtype=torch.int64)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    batch = {"input_ids": tokens, "labels": tokens}
    folded = capture_folded(module, batch, optimizer, None, 1.0, precision=MIXED, copies=COPIES)
    return folded, MIXED, layers or depth


def work(model: str, layers: int | None, ranks: list[int], pipe: Connection) -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    folded, precision, depth = captured(model, layers)
    seconds = time.perf_counter() - began
    for count in ranks:
        row = Row(model, depth, count, seconds)
        began = time.perf_counter()
        try:
            found = plan_folded(
                folded,
                read_cluster(f"h100x{count}"),
                limits=Limits(),
                precision=precision,
                execution=Execution("kernels"),
            )
            row.search = found.seconds["search"]
            row.priced, row.considered = len(found.search.priced), found.search.considered
            row.plan, row.step, row.mfu = found.plan.name, found.prediction.seconds, found.prediction.mfu
        except MeshwrightError as fault:
            row.search = time.perf_counter() - began
            row.plan = fault.diagnostics[0].code + ": " + fault.diagnostics[0].message[:60]
        row.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        pipe.send(row)
    pipe.send(None)


def measure(model: str, layers: int | None, ranks: list[int]) -> list[Row]:
    """In a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(model, layers, ranks, sender))
    process.start()
    sender.close()
    rows = []
    try:
        while (row := receiver.recv()) is not None:
            rows.append(row)
            print(line(row), flush=True)
    except EOFError:
        print(f"| {model} | failed |")
    process.join()
    return rows


HEAD = """\
| model | layers | ranks | capture s | search s | simulated of legal | plan | step s | MFU | peak MiB |
|---|---|---|---|---|---|---|---|---|---|"""


def line(row: Row) -> str:
    return (
        f"| {row.model} | {row.layers} | {row.ranks:,} | {row.capture:.1f} | {row.search:.1f} | "
        f"{row.priced} of {row.considered:,} | {row.plan} | {row.step:.3g} | {100 * row.mfu:.0f} % | {row.memory:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt.mw", "8B", "70B", "405B"], choices=["gpt.mw", *LLAMA])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512, 4096, 16384])
    parser.add_argument("--layers", nargs="+", type=int, default=[None], help="instead of the model's own number")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    print(
        f"Global batch {SAMPLES} x {TIME} tokens (gpt.mw: 16384 x 128); bf16 computation, fp32 weights, AdamW, clip 1."
    )
    print(HEAD)
    rows = [r for model in arguments.models for n in arguments.layers for r in measure(model, n, arguments.ranks)]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
