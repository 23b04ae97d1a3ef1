"""What recomputation takes out of forward, what it puts into backward, and what it leaves alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.graph.program import Graph, StepProgram, annotation
from meshwright.compiler.graph.text import print_graph
from meshwright.compiler.graph.text_parser import parse_graph, parse_local_graph
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.kept import of_the_batch
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.passes.recompute import recompute
from meshwright.compiler.passes.treated import blocks_around, one_by_one, pattern_of_all, treatments
from meshwright.compiler.plan import Recompute
from meshwright.frontend.capture import capture
from tests.unit.passes.stack import step
from tests.unit.separability.models import Norms

ALL = Recompute("blocks.*")
SELECTIVE = Recompute("blocks.*", "matmuls")


@pytest.fixture(scope="module")
def program() -> StepProgram:
    return step()


def name_of(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else "getitem"


def again(graph: Graph, block: str | None = None) -> Counter[str]:
    """The ops that are computed again, by name."""
    nodes = (n for n in graph.module.graph.nodes if annotation(n).recomputed)
    return Counter(name_of(n) for n in nodes if block is None or annotation(n).block == block)


def read_across(graph: Graph) -> set[fx.Node]:
    """The values that forward computes and backward reads: activations that are kept."""
    return {
        n
        for n in graph.module.graph.nodes
        if n.op == "call_function" and annotation(n).phase == "forward"
        if any(u.op == "call_function" and annotation(u).phase == "backward" for u in n.users)
    }


def test_only_the_inputs_of_blocks_are_kept(program: StepProgram) -> None:
    whole, less = program.micro, recompute(program.micro, (ALL,))
    kept = {n for n in read_across(less) if annotation(n).block}
    assert {name_of(n) for n in kept} == {"add"}, "the stream alone leaves a block"
    assert len(kept) < len({n for n in read_across(whole) if annotation(n).block}) / 3


def test_what_is_computed_again_with_nothing_saved(program: StepProgram) -> None:
    less = recompute(program.micro, (ALL,))
    for block in ("blocks.0", "blocks.1", "blocks.2"):
        # the second product and the dropout behind it lead to nothing that backward reads
        found = again(less, block)
        assert found["einsum"] == 1 and found["tanh"] == 1 and found["native_layer_norm"] == 1
        assert not found["dropout"]


def test_what_is_computed_again_with_matmuls_saved(program: StepProgram) -> None:
    found = again(recompute(program.micro, (SELECTIVE,)))
    assert found["native_layer_norm"] == found["tanh"] == 3
    assert not found["einsum"]


def test_everything_saved_is_the_same_graph(program: StepProgram) -> None:
    assert recompute(program.micro, (Recompute("blocks.*", "all"),)) is program.micro
    assert recompute(program.micro, ()) is program.micro


def test_of_every_so_many_blocks_the_first(program: StepProgram) -> None:
    less = recompute(program.micro, (Recompute("blocks.*", every=2),))
    assert again(less, "blocks.0") and again(less, "blocks.2") and not again(less, "blocks.1")


def test_the_first_entry_that_matches_counts(program: StepProgram) -> None:
    entries = (Recompute("blocks.1", "all"), Recompute("blocks.0", "matmuls"), ALL)
    assert treatments(program.micro, entries) == {"blocks.0": "matmuls", "blocks.2": "nothing"}
    assert one_by_one(program.micro, entries) == (Recompute("blocks.0", "matmuls"), Recompute("blocks.2"))


def test_a_module_within_blocks(program: StepProgram) -> None:
    found = again(recompute(program.micro, (Recompute("blocks.*.mlp"),)))
    assert found == {"einsum": 3, "add": 3, "tanh": 3}


def test_small_results_of_an_op_whose_large_one_is_kept(program: StepProgram) -> None:
    """The result of the norm is read by others, so its mean and deviation are kept with it."""
    assert not again(recompute(program.micro, (Recompute("blocks.*.norm"),)))


def test_outside_of_blocks_a_full_name_alone(program: StepProgram) -> None:
    assert set(treatments(program.micro, (Recompute("**"),))) == {"blocks.0", "blocks.1", "blocks.2"}
    assert set(treatments(program.micro, (Recompute("head"),))) == {"head"}


def test_a_pattern_that_fits_nothing(program: StepProgram) -> None:
    with pytest.raises(MeshwrightError, match=r"E0335(.|\n)*did you mean 'blocks.0'"):
        recompute(program.micro, (Recompute("block.0"),))
    with pytest.raises(MeshwrightError, match=r"E0335(.|\n)*the blocks are blocks\.\*"):
        recompute(program.micro, (Recompute("encoder.layers.*"),))


def test_the_given_graph_is_left_alone(program: StepProgram) -> None:
    before = print_graph(program.micro, "micro")
    recompute(program.micro, (ALL,))
    assert print_graph(program.micro, "micro") == before


@pytest.mark.parametrize("entry", [ALL, SELECTIVE], ids=["nothing", "matmuls"])
def test_every_op_is_needed(program: StepProgram, entry: Recompute) -> None:
    graph = recompute(program.micro, (entry,)).module.graph
    assert all(n.users for n in graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("entry", [ALL, SELECTIVE], ids=["nothing", "matmuls"])
def test_a_copy_stands_before_its_first_reader(program: StepProgram, entry: Recompute) -> None:
    """Between a copy and its first reader are copies that the reader needs too, and nothing else."""
    order = list(recompute(program.micro, (entry,)).module.graph.nodes)
    place = {n: i for i, n in enumerate(order)}
    for node in order:
        if annotation(node).recomputed:
            first = min(place[u] for u in node.users)
            assert all(annotation(n).recomputed for n in order[place[node] : first]), node


def test_what_forward_does_not_need_is_moved_and_not_doubled() -> None:
    """A value that backward alone reads is computed there, and is no recomputation."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.nn.functional.gelu(block(x), approximate="tanh")
            return x.sum()

    model = Doubling()
    micro = capture(model, {"x": torch.ones(8, 4)}, torch.optim.SGD(model.parameters(), lr=0.1)).micro
    less = recompute(micro, (Recompute("blocks.*"),))
    calls = [sum(n.op == "call_function" for n in g.module.graph.nodes) for g in (micro, less)]
    assert calls[1] - calls[0] <= sum(again(less).values())
    doubled = [n for n in less.module.graph.nodes if annotation(n).recomputed]
    originals = Counter(name_of(n) for n in less.module.graph.nodes if annotation(n).phase == "forward")
    assert all(originals[name_of(n)] for n in doubled)


def test_the_text_keeps_it(program: StepProgram) -> None:
    less = recompute(program.micro, (ALL,))
    text = print_graph(less, "micro")
    assert "# recompute blocks.0" in text
    name, back = parse_graph(text)
    assert print_graph(back, name) == text
    assert again(back) == again(less)
    assert {annotation(n).phase for n in back.module.graph.nodes if annotation(n).recomputed} == {"backward"}


def test_the_program_of_a_rank_keeps_it(program: StepProgram) -> None:
    local = compile_step(program, preset("fsdp=2,recompute", program, 2)).micro
    text = print_graph(local, "micro")
    assert text.count("aten.tanh.default") == 6
    name, back = parse_local_graph(text)
    assert print_graph(back, name) == text


def gathers(graph: fx.Graph) -> Counter[tuple[str, str]]:
    """How often the weights of each block are gathered in each phase, in elements."""
    found: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") in ("all_gather", "all_gather_many"):
            shards = [n for n in node.all_input_nodes if n.op == "placeholder"]
            found[annotation(node).block, annotation(node).phase] += len(shards)
    return found


@pytest.mark.parametrize("words", ["recompute", "selective"])
def test_weights_are_gathered_twice_and_not_three_times(program: StepProgram, words: str) -> None:
    plain = gathers(compile_step(program, preset("fsdp=2", program, 2)).micro.module.graph)
    with_it = gathers(compile_step(program, preset(f"fsdp=2,{words}", program, 2)).micro.module.graph)
    for block in ("blocks.0", "blocks.1", "blocks.2"):
        assert with_it[block, "forward"] == plain[block, "forward"] == 5
        # again once in backward: the bias of the norm, which no gradient needs, is read by the second norm
        assert with_it[block, "backward"] <= 5


class Counting(nn.Module):
    """Blocks with a running mean, and a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            top, where = torch.topk(block(x), 2, dim=1)
            x = torch.scatter(torch.zeros_like(x), 1, where, top.square()) + x
        return x.square().mean()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(torch.sin(x)))
        return torch.stack([torch.tanh(expert(x)) for expert in self.experts]).sum(0)


class Nested(nn.Module):
    """Blocks that hold blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_blocks_within_blocks() -> None:
    model = Nested()
    micro = capture(model, {"x": torch.randn(8, 4)}, torch.optim.SGD(model.parameters(), lr=0.1)).micro
    experts = {f"layers.{i}.experts.{j}" for i in range(2) for j in range(2)}
    assert blocks_around("layers.1.experts.0") == ("layers.1", "layers.1.experts.0")
    assert set(treatments(micro, (Recompute("layers.*"),))) == {"layers.0", "layers.1"}
    assert set(treatments(micro, (Recompute("**"),))) == {"layers.0", "layers.1"}
    assert set(treatments(micro, (Recompute("layers.*.experts.*"),))) == experts
    both = (Recompute("layers.*.experts.*", "all"), Recompute("layers.*"))
    assert set(treatments(micro, both)) == {"layers.0", "layers.1"}
    within = {annotation(n).block for n in recompute(micro, both).module.graph.nodes if annotation(n).recomputed}
    assert within == {"layers.0", "layers.1"}, "the experts keep everything, what is around them does not"
    assert pattern_of_all(micro) == ("layers.*",)


def test_choices_and_updates_of_buffers_happen_once() -> None:
    model = Counting()
    micro = capture(model, {"x": torch.randn(8, 4)}, torch.optim.SGD(model.parameters(), lr=0.1)).micro
    less = recompute(micro, (Recompute("blocks.*"), Recompute("**")))
    for name in ("topk", "sort"):
        assert not again(less)[name]
    buffers = [n for v, n in less.outputs().items() if v.kind == "buffer"]
    assert buffers and all(annotation(n).phase == "forward" for n in buffers)
    # nothing that is computed again leads to a buffer
    assert not any(u in buffers for n in less.module.graph.nodes if annotation(n).recomputed for u in n.users)
    assert pattern_of_all(micro) == ("blocks.*",)


def test_statistics_of_the_batch_are_kept() -> None:
    """For them ranks and microbatches would have to meet again; what is as large as the samples is computed again."""
    model = Norms(2)
    program = capture(model, torch.randn(8, 5), torch.optim.SGD(model.parameters(), lr=0.1))
    graph = recompute(program.micro, [Recompute("layers.*", "nothing")]).module.graph
    again = [n for n in graph.nodes if n.op == "call_function" and annotation(n).recomputed]
    assert again and not [n for n in again if of_the_batch(n)]
    assert {tuple(n.meta["val"].shape) for n in again if isinstance(n.meta["val"], Tensor)} >= {(8, 5)}
    kept = [n for n in graph.nodes if of_the_batch(n) and annotation(n).phase == "forward"]
    assert any(annotation(user).phase == "backward" for n in kept for user in _readers(n))


def _readers(node: fx.Node) -> set[fx.Node]:
    """Who reads a value, or what is made of it alone and is as small."""
    found = set(node.users)
    for user in node.users:
        if user.op == "call_function" and user.meta["val"].numel() <= node.meta["val"].numel():
            found |= _readers(user)
    return found
