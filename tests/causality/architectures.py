"""Architectures of ``transformers`` at small size, with what is expected of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 97
TIME = 12


@dataclass(frozen=True)
class Architecture:
    """``build`` makes the model; ``leaks`` are those that it has by design."""

    build: Callable[[], nn.Module]
    leaks: frozenset[str] = frozenset()
    decoder: bool = False

    def batch(self) -> dict[str, Tensor]:
        ids = torch.randint(3, VOCABULARY, (2, TIME), generator=torch.Generator().manual_seed(3))
        if self.decoder:
            return {"input_ids": ids, "decoder_input_ids": ids.flip(0).contiguous()}
        return {"input_ids": ids}


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _causal(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**{**_COMMON, **sizes})
        implementation = sizes.get("experts_implementation")
        if implementation is not None:
            config._experts_implementation = implementation
        torch.manual_seed(0)
        return getattr(transformers, sizes.get("model", f"{name}ForCausalLM"))(config)

    return build


_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_LFM2 = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}

ARCHITECTURES: dict[str, Architecture] = {
    "GPT-2": Architecture(_causal("GPT2", model="GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "Llama": Architecture(_causal("Llama")),
    "Llama, eager": Architecture(_causal("Llama", attn_implementation="eager")),
    "Qwen3": Architecture(_causal("Qwen3", head_dim=8)),
    "Gemma3": Architecture(
        _causal(
            "Gemma3Text",
            model="Gemma3ForCausalLM",
            head_dim=8,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "Mixtral": Architecture(_causal("Mixtral", **_MIXTRAL)),
    "Mixtral, eager": Architecture(_causal("Mixtral", experts_implementation="eager", **_MIXTRAL)),
    "Mixtral, batched": Architecture(_causal("Mixtral", experts_implementation="batched_mm", **_MIXTRAL)),
    "Mixtral, grouped": Architecture(_causal("Mixtral", experts_implementation="grouped_mm", **_MIXTRAL)),
    "Qwen3-MoE": Architecture(_causal("Qwen3Moe", **_QWEN_MOE)),
    "DeepSeek-V3": Architecture(_causal("DeepseekV3", **_DEEPSEEK)),
    "LFM2": Architecture(_causal("Lfm2", **_LFM2)),
    "LFM2-MoE": Architecture(
        _causal("Lfm2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=1, **_LFM2)
    ),
    "Mamba": Architecture(_causal("Mamba", state_size=4, conv_kernel=4, use_mambapy=False)),
    "Mamba2": Architecture(
        _causal("Mamba2", state_size=4, conv_kernel=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=4)
    ),
    "BERT": Architecture(_causal("Bert", model="BertForMaskedLM"), frozenset({"future"})),
    "T5": Architecture(
        _causal("T5", model="T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4),
        decoder=True,
    ),
    "T5, encoder": Architecture(
        _causal("T5", model="T5EncoderModel", d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4),
        frozenset({"future"}),
    ),
}
