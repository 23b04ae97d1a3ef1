"""What the presets make of a Llama is what an expert would write: which messages, where, and what is never whole."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import fx

from meshwright.compiler.graph.collectives import all_gather, all_gather_many, reduce_scatter, reduce_scatter_many
from meshwright.compiler.graph.program import StepProgram, Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture
from tests.models import VOCABULARY, Variant, llama

LAYERS = 3


@cache
def program() -> StepProgram:
    made = llama(Variant(layers=LAYERS), 0)
    return capture(made.model, made.batch, torch.optim.AdamW(made.model.parameters()), clip=1.0)


@cache
def compiled(text: str) -> RankProgram:
    return compile_step(program(), preset(text, program()))


def messages(graph: LocalGraph, phase: str) -> Counter[tuple[str, tuple[str, ...]]]:
    """How often each kind of collective is called over which axes in a phase; ``_many`` counts as one."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for node in graph.module.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name.startswith(("all_", "reduce_")) and annotation(node).phase == phase:
            axes = next(a for a in node.args[1:] if isinstance(a, tuple) and a and isinstance(a[0], str))
            found[name.removesuffix("_many"), axes] += 1
    return found


def test_tensor_parallelism_pays_two_sums_a_layer_each_way() -> None:
    """One after attention, one after the MLP; and the embedding, the log-sum-exp and the picked logits."""
    forward, backward = (messages(compiled("tp=2").micro, p) for p in ("forward", "backward"))
    assert forward == {("all_reduce", ("tensor",)): 2 * LAYERS + 3}
    # in backward the sums owed for the inputs of both column-parallel halves, and that of the head
    assert backward == {("all_reduce", ("tensor",)): 2 * LAYERS + 1}


def test_sequence_sharding_turns_each_sum_into_a_scatter_and_a_gather() -> None:
    forward = messages(compiled("tp=2,sp").micro, "forward")
    assert forward == {
        ("reduce_scatter", ("tensor",)): 2 * LAYERS + 1,
        ("all_gather", ("tensor",)): 2 * LAYERS + 1,
        ("all_reduce", ("tensor",)): 2,
    }


@pytest.mark.parametrize("text", ["tp=2", "tp=2,sp", "fsdp=2,tp=2"])
def test_no_rank_holds_the_whole_vocabulary(text: str) -> None:
    """Embedding, logits, softmax, loss and their gradients: no dim of any value of the step is the vocabulary."""
    rank = compiled(text)
    for graph in (rank.micro, rank.update):
        for node in graph.module.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                assert VOCABULARY not in value.shape, node.format_node()


def test_fully_sharded_weights_are_gathered_block_by_block_and_again_in_backward() -> None:
    forward, backward = (messages(compiled("fsdp=4").micro, p) for p in ("forward", "backward"))
    # the embedding; each block; the last norm with the head
    assert forward == {("all_gather", ("data",)): LAYERS + 2}
    assert backward[("all_gather", ("data",))] == LAYERS + 1  # nothing in backward reads the embedding
    assert backward[("reduce_scatter", ("data",))] == LAYERS + 2
    assert set(backward) == {("all_gather", ("data",)), ("reduce_scatter", ("data",))}


def test_gathered_weights_do_not_live_from_forward_to_backward() -> None:
    nodes = list(compiled("fsdp=4").micro.module.graph.nodes)
    gathers = [n for n in nodes if n.target in (all_gather, all_gather_many)]
    assert gathers
    for node in gathers:
        assert {annotation(u).phase for u in readers(node)} == {annotation(node).phase}


def test_whole_gradients_live_no_longer_than_their_block() -> None:
    """Each is cut before the backward of the block before begins."""
    nodes = list(compiled("fsdp=4").micro.module.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    for node in nodes:
        if node.target not in (reduce_scatter, reduce_scatter_many) or not annotation(node).block:
            continue
        number = int(annotation(node).block.rsplit(".", 1)[1])
        earlier = f"model.layers.{number - 1}"
        later = [position[n] for n in nodes if annotation(n).block == earlier and annotation(n).phase == "backward"]
        weights = [p for p in later if nodes[p].target in (all_gather, all_gather_many)]
        assert not weights or position[node] < weights[-1] + 40


@pytest.mark.parametrize(
    ("text", "rest", "gradient", "state"),
    [
        ("ddp=4", "[32, 32]", "[32, 32] +replica", "[32, 32]"),
        ("zero1=4", "[32, 32]", "[32, 32] +data", "[32@data, 32]"),
        ("zero2=4", "[32, 32]", "[32@data, 32]", "[32@data, 32]"),
        ("fsdp=4", "[32@data, 32]", "[32@data, 32]", "[32@data, 32]"),
        ("fsdp=2,tp=2", "[32@tensor@data, 32]", "[32@tensor@data, 32]", "[32@tensor@data, 32]"),
    ],
)
def test_what_is_stored_in_shards(text: str, rest: str, gradient: str, state: str) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    layout = compiled(text).layouts[name]
    assert (str(layout.rest), str(layout.gradient), str(layout.state)) == (rest, gradient, state)
    assert str(compiled(text).state[f"{name}/exp_avg"]) == state


def test_zero_1_scatters_the_gradients_and_gathers_the_weights_in_few_messages() -> None:
    found = messages(compiled("zero1=4").update, "update")
    assert found[("reduce_scatter", ("data",))] == found[("all_gather", ("data",))] == 1
    assert found[("all_reduce", ("data",))] == 1  # the norm


def test_fewer_key_value_heads_than_ranks_are_shared_in_groups() -> None:
    rank = compiled("tp=4")
    assert str(rank.mesh) == "tensor=2, group=2"
    layouts = rank.layouts
    assert str(layouts["model.layers.0.self_attn.q_proj.weight"].compute) == "[32@tensor@group, 32]"
    assert str(layouts["model.layers.0.self_attn.k_proj.weight"].compute) == "[16@tensor, 32]"
    # each copy of a key/value head has the gradient of its own queries; the sum over the copies is owed
    assert str(rank.update.inputs[Value("gradient", "model.layers.0.self_attn.k_proj.weight")]).endswith("+group")


def readers(node: fx.Node) -> set[fx.Node]:
    """Those that read a node, through ``getitem``."""
    found = set()
    for user in node.users:
        found |= readers(user) if getattr(user.target, "__name__", "") == "getitem" else {user}
    return found
