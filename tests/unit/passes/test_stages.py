"""What crosses the borders of stages: as little as there is to say, and nothing forward that goes back."""

from __future__ import annotations

from collections import Counter
from functools import cache

import torch
from torch import Tensor, nn

from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture

WIDTH = 6


class Layer(nn.Module):
    """Reads a second stream, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        seen = self.norm(x) if other is None else self.norm(x) * other
        return x + torch.tanh(self.up(seen))


class EncoderDecoder(nn.Module):
    """Every layer of the decoder reads what the encoder has made and a norm outside of all layers has scaled."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.decoder = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, read: Tensor, written: Tensor) -> Tensor:
        for layer in self.encoder:
            read = layer(read)
        memory = self.norm(read)
        for layer in self.decoder:
            written = layer(written, memory)
        return written.square().mean()


@cache
def captured() -> StepProgram:
    torch.manual_seed(0)
    model = EncoderDecoder()
    batch = {"read": torch.randn(4, WIDTH), "written": torch.randn(4, WIDTH)}
    return capture(model, batch, torch.optim.SGD(model.parameters(), lr=0.1))


def crossing(stages: int) -> Counter[tuple[int, str, int, str]]:
    """How many values go from a pass of a stage to a pass of another."""
    program = compile_plan(captured(), preset(f"pp={stages},micro=4", captured()))
    assert isinstance(program, PipelineProgram)
    return Counter(
        (source, made, number, kind)
        for number, stage in enumerate(program.stages)
        for (kind, _), (source, made) in stage.takes.items()
        if source != number
    )


def test_the_decoder_is_given_the_encoders_result_and_gives_one_gradient_back() -> None:
    """Two stages of each. What the decoder's second stage gives back of the memory the first one adds to its own."""
    found = crossing(4)
    into = Counter[tuple[int, str]]()
    for (_, made, number, kind), count in found.items():
        if made == kind:
            into[number, kind] += count
    assert [into[number, "F"] for number in range(4)] == [0, 1, 1, 2], "the last one gets its stream and the memory"
    assert [into[number, "I"] for number in range(4)] == [1, 1, 2, 0], "and gives back gradients of both"
    assert found[3, "I", 2, "I"] == 2 and found[2, "I", 1, "I"] == 1


def test_no_forward_value_goes_to_an_earlier_stage() -> None:
    for stages in (2, 4, 8):
        for (source, made, number, kind), _ in crossing(stages).items():
            assert number > source if made == "F" else number < source, (source, made, number, kind)
