"""Deeper models of several architectures, with a batch for each, for what repeats: ``model(layers)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.models import MODELS, Variant

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 12,
    "use_cache": False,
    "pad_token_id": 0,
}
Made = tuple[nn.Module, dict[str, Tensor]]


def tokens() -> Tensor:
    return torch.randint(97, (8, 12), generator=torch.Generator().manual_seed(0))


def language_model(model: nn.Module) -> Made:
    return model, {"input_ids": tokens(), "labels": tokens()}


def known(name: str) -> Callable[[int], Made]:
    def make(layers: int) -> Made:
        example = MODELS[name](Variant(layers=layers), 0)
        return example.model, example.batch

    return make


def mixtral(layers: int, **more: Any) -> Made:
    sizes = {**SIZES, "num_hidden_layers": layers, "num_local_experts": 4, "num_experts_per_tok": 2, **more}
    return language_model(transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)))


def gemma3(layers: int, pattern: str = "ssf") -> Made:
    """Sliding and full attention in a pattern, over and over."""
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    types = [kinds[pattern[i % len(pattern)]] for i in range(layers)]
    config = transformers.Gemma3TextConfig(
        **SIZES, num_hidden_layers=layers, layer_types=types, sliding_window=4, query_pre_attn_scalar=8
    )
    return language_model(transformers.Gemma3ForCausalLM(config))


def deepseek(layers: int, dense: int = 3) -> Made:
    """The first layers are dense, the others have experts."""
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}  # its heads have parts
    config = transformers.DeepseekV3Config(
        **{**sizes, "num_key_value_heads": 4, "num_hidden_layers": layers, "first_k_dense_replace": dense},
        moe_intermediate_size=16,
        n_shared_experts=1,
        n_routed_experts=8,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        qk_nope_head_dim=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
    )
    return language_model(transformers.DeepseekV3ForCausalLM(config))


def t5(layers: int) -> Made:
    """The first block of each stack has the relative bias that all blocks read."""
    config = transformers.T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=40,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens()}


def whisper(layers: int) -> Made:
    """Every decoder layer reads what the encoder gives."""
    config = transformers.WhisperConfig(
        vocab_size=97,
        num_mel_bins=8,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        d_model=32,
        max_source_positions=12,
        max_target_positions=12,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    features = torch.randn(8, 8, 24, generator=torch.Generator().manual_seed(0))
    return transformers.WhisperForConditionalGeneration(config), {"input_features": features, "labels": tokens()}


def swin(layers: int) -> Made:
    """Blocks within stages; plain and shifted windows alternate."""
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, layers],
        num_heads=[2, 4],
        window_size=4,
        num_labels=7,
        drop_path_rate=0.0,
    )
    pixels = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return transformers.SwinForImageClassification(config), {"pixel_values": pixels, "labels": tokens()[:, 0] % 7}


def albert(layers: int) -> Made:
    """One layer, called again and again."""
    config = transformers.AlbertConfig(
        vocab_size=97,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=12,
    )
    return language_model(transformers.AlbertForMaskedLM(config))
