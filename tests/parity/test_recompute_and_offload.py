"""Recomputed and offloaded steps agree with one device: gradients and updated weights, with dropout on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers

from meshwright.compiler.graph.program import annotation
from meshwright.compiler.graph.widen import widen
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.models import HEADS, INNER, KEY_VALUE_HEADS, TIME, VOCABULARY, WIDTH, Example, Variant, _language_model
from tests.parity.harness import SEED, Cell, Task, adamw, canonical, far, measure
from tests.reference import reference_steps

TOLERANCE = 1e-9
DROPOUT = Variant(dropout=0.1)

CELLS = (
    Cell(Task("GPT-2", DROPOUT), "fsdp=4,recompute", 4),
    Cell(Task("GPT-2", DROPOUT), "fsdp=2,tp=2,sp,selective", 4, 4),
    Cell(Task("Llama", DROPOUT), "fsdp=2,tp=2,sp,recompute", 4),
    Cell(Task("gpt.mw"), "fsdp=4,recompute=2,prefetch", 4),
    Cell(Task("BERT", DROPOUT), "ddp=2,fsdp=2,selective,offload", 4, 4),
    Cell(Task("ViT", DROPOUT), "zero2=4,recompute,offload", 4),
    Cell(Task("Llama", optimizer="Muon"), "fsdp=2,tp=2,recompute,offload", 4),
)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_agrees_with_one_device(cell: Cell) -> None:
    found = measure(cell)
    assert found.worst < TOLERANCE, found


def mixtures(kind: str) -> list[Example]:
    """Two batches for a small mixture of experts; ``kind``: ``mixtral`` or ``qwen3_moe``."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "max_position_embeddings": TIME,
        "num_experts_per_tok": 2,
        "attention_dropout": 0.1,
        "use_cache": False,
        "experts_implementation": "batched_mm",  # the grouped product has no kernel for float64
    }
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=4)
        return [_language_model(lambda: transformers.MixtralForCausalLM(config), seed) for seed in range(2)]
    more = transformers.Qwen3MoeConfig(**sizes, head_dim=10, moe_intermediate_size=24, num_experts=4)
    return [_language_model(lambda: transformers.Qwen3MoeForCausalLM(more), seed) for seed in range(2)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("mixtral", "fsdp=4,recompute", marks=pytest.mark.slow),
        ("qwen3_moe", "fsdp=4,recompute=2,offload"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no rule for")
def test_tokens_go_to_the_same_experts(kind: str, words: str) -> None:
    """Experts are chosen in forward; a second choice in backward could differ from it."""
    examples = mixtures(kind)
    model = examples[0].model
    truth = reference_steps(model, [e.batch for e in examples], adamw, 0.5, seed=SEED)
    program = widen(capture(model, examples[0].batch, optimizer=adamw(model), clip=0.5))
    rank_program = compile_step(program, preset(words, program, 4))
    chosen = [n for n in rank_program.micro.module.graph.nodes if "topk" in str(n.target)]
    assert len(chosen) == 2 and all(annotation(n).phase == "forward" for n in chosen)
    cluster = VirtualCluster(
        rank_program, from_module(copy.deepcopy(model).double()), seed=SEED, keep_gradients=True
    )  # fmt: skip
    for example, step in zip(examples, truth, strict=True):
        cluster.step(example.batch)
        assert far(cluster.full_gradients(), canonical(program, step.gradients)) < TOLERANCE
        assert far(cluster.full_parameters(), canonical(program, step.weights)) < TOLERANCE
