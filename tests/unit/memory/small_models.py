"""Models of two layers that are large enough for activations to count, and their captured steps."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from torch import Tensor, nn

from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.plan import Precision
from meshwright.frontend.capture import capture
from meshwright.frontend.language import load
from tests.models import EXAMPLES

WIDTH, TIME, VOCABULARY, BATCH = 64, 32, 256, 16
MIXED = Precision("bf16", "fp32", "fp32")


@cache
def model(name: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module
    if name == "GPT-2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=TIME, n_embd=WIDTH, n_layer=2, n_head=4, resid_pdrop=dropout,
            embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=None, eos_token_id=None, use_cache=False,
        )  # fmt: skip
        made = transformers.GPT2LMHeadModel(config)
    elif name == "Llama":
        made = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=3 * WIDTH,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=TIME,
                use_cache=False,
            )
        )
    else:
        sizes = {"t": TIME, "d": WIDTH, "f": 4 * WIDTH, "vocab": VOCABULARY, "layers": 2, "batch": BATCH, "h": 4}
        made = load(str(EXAMPLES / name), {**sizes, "c": WIDTH // 4}).loss_module()
    return made.float().train()


def batch(name: str) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, TIME), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens} if name.endswith(".mw") else {"input_ids": tokens, "labels": tokens}


@cache
def program(name: str, dropout: float = 0.0, precision: Precision | None = None) -> StepProgram:
    made = model(name, dropout)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    return capture(made, batch(name), optimizer, clip=1.0, precision=precision)
