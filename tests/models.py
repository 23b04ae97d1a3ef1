"""Small models of known architectures, made from configurations alone, with a batch for each.

Sizes are chosen against comfort: 4 query and 2 key/value heads (so that 4 ranks share 2 heads and
3 ranks cannot divide 4), a vocabulary of 97 (a prime), 12 positions, samples with unequal numbers of valid
tokens, one of them with none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from meshwright.frontend.language import load_text

EXAMPLES = Path(__file__).parents[1] / "examples"
WIDTH = 32
HEADS = 4
KEY_VALUE_HEADS = 2
INNER = 40
VOCABULARY = 97
TIME = 12
BATCH = 16
IGNORED = -100


@dataclass(frozen=True)
class Variant:
    """What a cell of the parity table may change about a model."""

    tied: bool | None = None
    """Whether embedding and head share their weight; None: as the architecture has it."""
    dropout: float = 0.0
    layers: int = 2


@dataclass(frozen=True)
class Example:
    """A model in float32 and training mode, and a global batch (keyword arguments) that includes the labels.

    The model returns its loss, or something that has it as ``loss``.
    """

    model: nn.Module
    batch: dict[str, Tensor]


def tokens(seed: int, vocabulary: int = VOCABULARY) -> Tensor:
    """Token numbers ``[BATCH, TIME]``."""
    return torch.randint(vocabulary, (BATCH, TIME), generator=torch.Generator().manual_seed(seed))


def labels(inputs: Tensor) -> Tensor:
    """The tokens again, of which sample i keeps only the first few: unequal counts, and one sample with none."""
    kept = (torch.arange(inputs.shape[0]) * 7) % (inputs.shape[1] + 1)
    position = torch.arange(inputs.shape[1])
    return torch.where(position[None, :] < kept[:, None], inputs, IGNORED)


def gpt2(variant: Variant, seed: int) -> Example:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TIME,
        n_embd=WIDTH,
        n_layer=variant.layers,
        n_head=HEADS,
        n_inner=INNER,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=variant.dropout,
        embd_pdrop=variant.dropout,
        attn_pdrop=variant.dropout,
        tie_word_embeddings=_tied(variant, True),
    )
    return _language_model(lambda: transformers.GPT2LMHeadModel(config), seed)


def llama(variant: Variant, seed: int) -> Example:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=variant.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        max_position_embeddings=TIME,
        attention_dropout=variant.dropout,
        tie_word_embeddings=_tied(variant, False),
        use_cache=False,
    )
    return _language_model(lambda: transformers.LlamaForCausalLM(config), seed)


def qwen3(variant: Variant, seed: int) -> Example:
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=variant.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=10,
        max_position_embeddings=TIME,
        attention_dropout=variant.dropout,
        tie_word_embeddings=_tied(variant, True),
        use_cache=False,
    )
    return _language_model(lambda: transformers.Qwen3ForCausalLM(config), seed)


def t5(variant: Variant, seed: int) -> Example:
    """Encoder and decoder, the former one block deeper if they do not come out even; all share one table."""
    encoder = (variant.layers + 1) // 2
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=INNER,
        num_layers=encoder,
        num_decoder_layers=variant.layers - encoder,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=TIME,
        dropout_rate=variant.dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=_tied(variant, True),
        use_cache=False,
    )
    read, written = tokens(seed), tokens(seed + 100)
    lengths = 4 + (torch.arange(BATCH) * 5) % (TIME - 3)
    mask = (torch.arange(TIME)[None, :] < lengths[:, None]).long()
    batch = {"input_ids": read, "attention_mask": mask, "labels": labels(written)}
    return Example(_made(lambda: transformers.T5ForConditionalGeneration(config), 0), batch)


def bert(variant: Variant, seed: int) -> Example:
    """A masked language model whose samples have unequal lengths, so that attention has a mask made of data."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=variant.layers,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        max_position_embeddings=TIME,
        hidden_dropout_prob=variant.dropout,
        attention_probs_dropout_prob=variant.dropout,
        tie_word_embeddings=_tied(variant, True),
    )
    inputs = tokens(seed)
    lengths = 4 + (torch.arange(BATCH) * 5) % (TIME - 3)
    mask = (torch.arange(TIME)[None, :] < lengths[:, None]).long()
    batch = {"input_ids": inputs, "attention_mask": mask, "labels": torch.where(mask.bool(), labels(inputs), IGNORED)}
    return Example(_made(lambda: transformers.BertForMaskedLM(config), 0), batch)


def vit(variant: Variant, seed: int) -> Example:
    """An image classifier: 16 patches and a class token, 7 classes, three samples without a label."""
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=variant.layers,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        image_size=16,
        patch_size=4,
        num_labels=7,
        hidden_dropout_prob=variant.dropout,
        attention_probs_dropout_prob=variant.dropout,
    )
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(7, (BATCH,), generator=generator)
    classes[::6] = IGNORED
    batch = {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator), "labels": classes}
    return Example(_made(lambda: transformers.ViTForImageClassification(config), 0), batch)


def gpt_mw(variant: Variant, seed: int) -> Example:
    return _language_file("gpt.mw", {"h": HEADS, "c": WIDTH // HEADS}, variant, seed)


def llama_mw(variant: Variant, seed: int) -> Example:
    return _language_file("llama.mw", {"h": HEADS, "g": KEY_VALUE_HEADS, "c": WIDTH // HEADS}, variant, seed)


Factory = Callable[[Variant, int], Example]
"""``factory(variant, seed)``: the weights are always the same, ``seed`` makes the batch."""

MODELS: dict[str, Factory] = {
    "gpt.mw": gpt_mw,
    "llama.mw": llama_mw,
    "GPT-2": gpt2,
    "Llama": llama,
    "Qwen3": qwen3,
    "T5": t5,
    "BERT": bert,
    "ViT": vit,
}


def _tied(variant: Variant, default: bool) -> bool:
    return default if variant.tied is None else variant.tied


def _language_model(build: Callable[[], nn.Module], seed: int) -> Example:
    inputs = tokens(seed)
    return Example(_made(build, 0), {"input_ids": inputs, "labels": labels(inputs)})


def _language_file(name: str, sizes: dict[str, int], variant: Variant, seed: int) -> Example:
    """A file of the examples at the sizes of this module, with labels of their own, some of which do not count, and
    dropout if it is asked for; what the file says of tying stays."""
    if variant.tied is not None:
        raise ValueError(f"{name} says itself what is tied")
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    changes = [
        (r"\(tokens: int\[b t\]\)", "(tokens: int[b t], labels: int[b t])"),
        (r"\(tokens\) over vocab, next\(tokens over t\)", "(tokens, labels) over vocab, next(labels over t)"),
    ]
    if variant.dropout:
        changes += [(rf"x \+ ({f}\(.*\))", rf"x + dropout(\1, {variant.dropout})") for f in ("attention", "mlp")]
    for old, new in changes:
        text, count = re.subn(old, new, text)
        if count != 1:
            raise ValueError(f"{name} has not one '{old}'")
    # the data of these files are bytes, so their vocabulary is 257, the smallest prime that holds them
    small = {"t": TIME, "d": WIDTH, "f": INNER, "vocab": 257, "layers": variant.layers, "batch": BATCH}
    loaded = load_text(text, str(EXAMPLES / name), {**small, **sizes})
    inputs = tokens(seed)
    return Example(_made(loaded.loss_module, 0), {"tokens": inputs, "labels": labels(inputs)})


def _made(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model with seeded weights of a size that lets every parameter matter (biases are not left at zero)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build().float().train()
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.1 if parameter.ndim < 2 else 0.5 / math.sqrt(parameter.shape[-1])
                parameter.add_(torch.randn(parameter.shape) * scale)
    return model
