"""Step time and peak memory of pipelines against ``torch.distributed.pipelining``: same model, schedule, microbatches.

Measured as :mod:`benchmarks.step_time` does: all processes alive at once, contenders in turn, medians.

    python -m benchmarks.pipeline_time [--ranks 4] [--rounds 5] [--steps 2] [--only "PyTorch 1F1B" "Meshwright 1f1b"]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import meshwright
from benchmarks.step_time import (
    BATCH,
    CLIP,
    TIME,
    WIDTH,
    Step,
    build_batch,
    build_model,
    build_optimizer,
    run,
)

MICROBATCHES = 8
LAYERS_OF_A_RANK = 2


def whole_model() -> Any:
    return build_model(layers=LAYERS_OF_A_RANK * dist.get_world_size())


class Part(nn.Module):
    """Some layers of the model, with the embedding before the first and the head after the last."""

    def __init__(self, model: Any, number: int, count: int) -> None:
        super().__init__()
        layers = model.model.layers
        each = len(layers) // count
        self.layers = nn.ModuleList(layers[number * each : (number + 1) * each])
        self.rotary = model.model.rotary_emb
        self.embed = model.model.embed_tokens if number == 0 else None
        self.norm = model.model.norm if number == count - 1 else None
        self.head = model.lm_head if number == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        positions = torch.arange(x.shape[1])[None]
        angles = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=angles)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def torch_pipeline(schedule: str, virtual: int) -> Callable[[], Step]:
    def build() -> Step:
        model, rank, ranks = whole_model(), dist.get_rank(), dist.get_world_size()
        count = virtual * ranks
        mine = [rank + ranks * i for i in range(virtual)]
        if schedule == "ScheduleZBVZeroBubble":
            mine = [rank, count - 1 - rank]
        parts = [Part(model, number, count) for number in mine]
        stages = [PipelineStage(p, n, count, torch.device("cpu")) for p, n in zip(parts, mine, strict=True)]
        made = getattr(schedules, schedule)
        runner: Any = made(stages if virtual > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
        parameters = [p for part in parts for p in part.parameters()]
        optimizer = build_optimizer(parameters)
        first, last = 0 in mine, count - 1 in mine

        def step(batch: dict[str, Tensor]) -> float:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            given = (batch["input_ids"],) if first else ()
            extra = {"target": batch["labels"], "losses": losses} if last else {}
            runner.step(*given, **extra)
            norm = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum()
            dist.all_reduce(norm)
            scale = torch.clamp(CLIP / (norm.sqrt() + 1e-6), max=1.0)
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(scale)
            optimizer.step()
            total = torch.stack(losses).mean().detach() if losses else torch.zeros(())
            dist.all_reduce(total)
            return float(total)

        return step

    return build


def compiled(schedule: str) -> Callable[[], Step]:
    def build() -> Step:
        model = whole_model()
        plan = f"pp={dist.get_world_size()},micro={MICROBATCHES},schedule={schedule}"
        optimizer = build_optimizer(model.parameters())
        step = meshwright.parallelize(model, optimizer=optimizer, batch=build_batch(0), plan=plan, clip=CLIP)
        del model
        return lambda batch: float(step(batch))

    return build


PAIRS = {
    "GPipe": ("ScheduleGPipe", 1, "gpipe"),
    "1F1B": ("Schedule1F1B", 1, "1f1b"),
    "interleaved 1F1B": ("ScheduleInterleaved1F1B", 2, "interleaved"),
    "ZB-V": ("ScheduleZBVZeroBubble", 2, "zb-v"),
}
CONTENDERS: dict[str, Callable[[], Step]] = {}
BASELINE: dict[str, str] = {}
for name, (theirs, virtual, ours) in PAIRS.items():
    CONTENDERS[f"PyTorch {name}"] = torch_pipeline(theirs, virtual)
    CONTENDERS[f"Meshwright {ours}"] = compiled(ours)
    BASELINE[f"Meshwright {ours}"] = f"PyTorch {name}"


def in_words(ranks: int) -> str:
    layers = LAYERS_OF_A_RANK * ranks
    return f"{layers} layers, width {WIDTH}; batch {BATCH} x {TIME} tokens in {MICROBATCHES} microbatches"


def main() -> None:
    run("benchmarks.pipeline_time", __doc__, BASELINE, in_words)


if __name__ == "__main__":
    main()
