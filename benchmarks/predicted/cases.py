"""The models and plans that are predicted and measured: small, so that every rank of a laptop holds several."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import transformers
from torch import Tensor, nn

from meshwright.compiler.graph.program import StepProgram
from meshwright.frontend.capture import capture
from meshwright.runtime.materialize import Weights, from_module

VOCABULARY, TIME, BATCH, LAYERS, WIDTH, HEADS, KEY_VALUE_HEADS, INNER = 1024, 64, 16, 3, 192, 8, 4, 512


@dataclass(frozen=True)
class Case:
    """A model and a plan for it on so many ranks."""

    model: str
    plan: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.model} {self.plan}"


CASES = (
    Case("gpt2", "ddp=1", 1),
    Case("gpt2", "ddp=1,recompute", 1),
    Case("llama", "ddp=1,selective,micro=2", 1),
    Case("llama", "ddp=1,offload,micro=4", 1),
    Case("gpt2", "ddp=2", 2),
    Case("gpt2", "zero1=2,micro=2", 2),
    Case("llama", "fsdp=2,offload", 2),
    Case("llama", "tp=2,sp", 2),
    Case("llama", "fsdp=2,recompute,prefetch", 2),
    Case("gpt2", "ddp=4", 4),
    Case("gpt2", "fsdp=2,tp=2", 4),
    Case("llama", "zero2=4,micro=2", 4),
    Case("llama", "fsdp=4,prefetch", 4),
    Case("llama", "tp=4", 4),
    Case("llama", "ddp=2,tp=2,sp,selective", 4),
    Case("gpt2", "ddp=8", 8),
    Case("gpt2", "fsdp=8", 8),
    Case("gpt2", "zero1=4,tp=2,recompute", 8),
    Case("llama", "fsdp=4,tp=2,sp", 8),
    Case("llama", "ddp=2,fsdp=4,micro=2", 8),
)
"""The planner's choices between them: what is sharded, over how many ranks, recomputed, offloaded, begun ahead."""


@dataclass(frozen=True)
class Model:
    """A captured training step with its weights and a batch."""

    program: StepProgram
    weights: Weights
    batch: dict[str, Tensor]


@cache
def model(name: str) -> Model:
    """``gpt2`` or ``llama`` of transformers, with the dropout that they have."""
    torch.manual_seed(0)
    made = (_gpt2() if name == "gpt2" else _llama()).float().train()
    tokens = torch.randint(VOCABULARY, (BATCH, TIME), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, weight_decay=0.1)
    return Model(capture(made, batch, optimizer, clip=1.0), from_module(made), batch)


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=TIME,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_VALUE_HEADS,
            max_position_embeddings=TIME,
            use_cache=False,
        )
    )
