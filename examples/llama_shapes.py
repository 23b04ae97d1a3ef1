"""Llama 3.1 in its published sizes, for planning (needs ``pip install transformers``).

    meshwright plan examples.llama_shapes:llama_70b --cluster h100x64

``plan`` and ``simulate`` make the model on the meta device, so that it needs no memory. ``--set time=8192`` gives other
samples, ``--batch`` and ``--tokens`` another global batch.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers


def llama(layers: int, width: int, heads: int, inner: int, batch: int, time: int) -> dict[str, Any]:
    """A training step of a Llama with 8 key/value heads and a vocabulary of 128,256."""
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=time, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.zeros(batch, time, dtype=torch.int64)
    return {
        "model": model,
        "batch": {"input_ids": tokens, "labels": tokens},
        "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1),
        "clip": 1.0,
        "precision": "bf16 compute, fp32 weights, fp32 reductions",
    }


def llama_8b(batch: int = 256, time: int = 4096) -> dict[str, Any]:
    """8.03 billion parameters."""
    return llama(32, 4096, 32, 14_336, batch, time)


def llama_70b(batch: int = 256, time: int = 4096) -> dict[str, Any]:
    """70.6 billion parameters."""
    return llama(80, 8192, 64, 28_672, batch, time)


def llama_405b(batch: int = 1024, time: int = 4096) -> dict[str, Any]:
    """405.9 billion parameters."""
    return llama(126, 16_384, 128, 53_248, batch, time)
