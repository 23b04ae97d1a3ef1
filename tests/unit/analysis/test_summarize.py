"""What a summary says of single ops, and of whole steps where the numbers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.compiler.analysis.strides import as_view, contiguous, elements
from meshwright.compiler.analysis.summarize import summarize, summarize_graph
from meshwright.compiler.communication import communication
from meshwright.compiler.emit.artefact import read_artefact, write_artefact
from meshwright.compiler.emit.manifest import SourceDescription
from meshwright.compiler.graph.text_parser import parse_local_graph
from meshwright.compiler.memory import memory
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.passes.verify_shapes import lay_out, verify_shapes
from meshwright.compiler.plan import Recompute
from meshwright.compiler.summary import Kernel, Message, RankSummary, Transfer, Wait
from meshwright.compiler.train_settings import TrainSettings
from tests.unit.memory.small_models import BATCH, TIME, VOCABULARY, WIDTH, program

MESH = Mesh((("micro", 1), ("data", 2)))


def kernel(line: str, result: str, **inputs: str) -> Kernel:
    """The kernel of one op on inputs of the given types."""
    text = "local graph a\n" + "".join(f'  %{n}: {t} = input batch "{n}"\n' for n, t in inputs.items())
    text += f'  %made: {result} = {line}\n  output result "made" = %made\n'
    (item,) = summarize_graph(parse_local_graph(text)[1], MESH).items
    assert isinstance(item.work, Kernel)
    return item.work


@pytest.mark.parametrize(
    ("equation", "x", "y", "made", "sizes"),
    [
        ("bti,oi->bto", "f32[2, 3, 4]", "f32[5, 4]", "f32[2, 3, 5]", (1, 6, 5, 4)),
        ("bto,bti->oi", "f32[2, 3, 5]", "f32[2, 3, 4]", "f32[5, 4]", (1, 5, 4, 6)),
        ("bhts,bhsc->bhtc", "f32[2, 3, 4, 5]", "f32[2, 3, 5, 6]", "f32[2, 3, 4, 6]", (6, 4, 6, 5)),
        ("bhtc,hcd->btd", "f32[2, 3, 4, 5]", "f32[3, 5, 6]", "f32[2, 4, 6]", (1, 8, 6, 15)),
    ],
)
def test_products(equation: str, x: str, y: str, made: str, sizes: tuple[int, ...]) -> None:
    found = kernel(f'meshwright.einsum.default("{equation}", %x, %y)', made, x=x, y=y)
    batch, m, n, k = sizes
    assert (found.kind, found.sizes, found.flops) == ("matmul", sizes, 2.0 * batch * m * n * k)
    assert found.read == 4 * batch * (m * k + k * n)
    assert found.written == 4 * batch * m * n


def test_a_causal_attention_computes_half() -> None:
    form = "0, 0.5, 0.0, 0, [], []"
    tensors = dict.fromkeys("qkv", "bf16[2, 4, 16, 8]")
    made = "(bf16[2, 4, 16, 8], f32[2, 4, 16])"
    text = "meshwright.attention.default(%q, %k, %v, None, None, {}, " + form + ")"
    graph = "local graph a\n" + "".join(f'  %{n}: {t} = input batch "{n}"\n' for n, t in tensors.items())
    graph += f"  %made: {made} = {{}}\n  %out: bf16[2, 4, 16, 8] = operator.getitem(%made, 0)\n"
    graph += '  output result "out" = %out\n'
    full, causal = (
        summarize_graph(parse_local_graph(graph.format(text.format(c)))[1], MESH).items[0].work
        for c in ("False", "True")
    )
    assert isinstance(full, Kernel) and isinstance(causal, Kernel)
    assert full.sizes == causal.sizes == (2, 4, 16, 16, 8)
    assert full.flops == 2 * 2 * 2 * 4 * 16 * 16 * 8
    assert causal.flops == full.flops / 2
    assert (full.kind, full.dtype) == ("attention", "bf16")


def test_bytes_are_those_that_are_moved() -> None:
    # the table is read where it is looked up
    found = kernel("meshwright.embedding.default(%w, %i, 0, -1)", "f32[6, 8]", w="f32[1000, 8]", i="i64[6]")
    assert (found.kind, found.read, found.written) == ("lookup", 6 * 8 * 4 + 6 * 8, 6 * 8 * 4)
    # what is broadcast is read once
    found = kernel("aten.add.Tensor(%x, %y)", "f32[6, 8]", x="f32[6, 8]", y="f32[8]")
    assert (found.kind, found.read, found.written) == ("elementwise", 4 * (48 + 8), 4 * 48)
    found = kernel("aten.sum.dim_IntList(%x, [1])", "f32[6]", x="f32[6, 8]")
    assert (found.kind, found.read, found.written, found.flops) == ("reduction", 4 * 48, 4 * 6, 48)
    found = kernel("aten.convolution.default(%x, %w, None, [1], [0], [1], False, [0], 1)", "f32[2, 5, 8]",
                   x="f32[2, 3, 10]", w="f32[5, 3, 3]")  # fmt: skip
    assert (found.kind, found.sizes, found.flops) == ("matmul", (1, 16, 5, 9), 2.0 * 16 * 5 * 9)


def test_a_view_costs_nothing_and_a_reshape_that_moves_data_is_a_copy() -> None:
    assert kernel("aten.reshape.default(%x, [48])", "f32[48]", x="f32[6, 8]") == Kernel(
        "aten.reshape.default", "view", 0.0, 0, 0
    )
    text = (
        'local graph a\n  %x: f32[6, 8] = input batch "x"\n  %t: f32[8, 6] = aten.permute.default(%x, [1, 0])\n'
        '  %y: f32[48] = aten.reshape.default(%t, [48])\n  output result "y" = %y\n'
    )
    graph = parse_local_graph(text)[1]
    for node in graph.module.graph.nodes:
        if node.op == "call_function":
            del node.meta["val"]  # the text does not say how values lie
    found = summarize_graph(verify_shapes(graph, MESH), MESH)
    assert [i.work.kind for i in found.items if isinstance(i.work, Kernel)] == ["view", "copy"]
    assert [i.reads for i in found.items] == [(-1,), (0,)]
    assert [(b.bytes, b.born, b.last) for b in found.buffers if b.name == "y"] == [(192, 1, 2)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_views_are_those_of_torch(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    cut = data.draw(st.integers(0, len(shape) - 1))
    x = torch.empty(shape).permute(order)
    x = x.narrow(cut, 0, max(1, x.shape[cut] - data.draw(st.integers(0, 1))))
    count = x.numel()
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    first = data.draw(st.sampled_from(divisors))
    second = data.draw(st.sampled_from([n for n in divisors if (count // first) % n == 0]))
    wanted = [first, second, count // first // second]
    try:
        x.view(wanted)
    except RuntimeError:
        possible = False
    else:
        possible = True
    assert as_view(x.shape, x.stride(), wanted) is possible
    assert contiguous(x.shape, x.stride()) is x.is_contiguous()
    assert elements(x.shape, x.stride()) == count
    assert elements((*x.shape, 5), (*x.stride(), 0)) == count


def summary(text: str, **changes: object) -> RankSummary:
    plan = replace(preset(text, program("GPT-2")), **changes)  # type: ignore[arg-type]  # fields of Plan
    return summarize(compile_step(program("GPT-2"), plan))


def test_a_program_that_was_read_is_summarized_as_the_one_that_was_written(tmp_path: Path) -> None:
    plan = replace(preset("fsdp=2,tp=2,sp,micro=2", program("GPT-2")), prefetch=1)
    rank_program = compile_step(program("GPT-2"), plan)
    write_artefact(rank_program, tmp_path / "build", SourceDescription("factory", "a:b"), TrainSettings())
    read = read_artefact(tmp_path / "build").rank_program
    lay_out(read)
    assert memory(summarize(read)) == memory(summarize(rank_program))
    assert communication(summarize(read)) == communication(summarize(rank_program))


def test_model_flops_are_six_for_each_weight_and_token_and_attention() -> None:
    found = summary("ddp=2")
    tokens = BATCH * TIME
    weights = 2 * 12 * WIDTH**2 + VOCABULARY * WIDTH
    attention = 2 * (2 + 5) * BATCH * TIME * TIME * WIDTH  # two products forward, five backward, half of each
    assert found.model_flops == 6.0 * weights * tokens + attention
    assert (found.tokens, found.samples) == (tokens, BATCH)


def test_ranks_share_the_work() -> None:
    def products(found: RankSummary) -> float:
        works = [i.work for i in found.micro.items]
        return sum(w.flops for w in works if isinstance(w, Kernel) and w.kind in ("matmul", "attention"))

    whole = summary("ddp=1")
    assert products(whole) == whole.model_flops
    assert products(summary("ddp=2,micro=4")) == whole.model_flops / 2 / 4
    assert products(summary("fsdp=2,tp=2,sp")) == pytest.approx(whole.model_flops / 4, rel=0.02)


def test_what_is_recomputed_is_told() -> None:
    found = summary("ddp=1", recompute=(Recompute("**", "nothing"),))
    again = [i for i in found.micro.items if i.recomputed]
    assert {i.block for i in again} == {"transformer.h.0", "transformer.h.1"}
    assert {i.phase for i in again} == {"backward"}
    assert found.model_flops == summary("ddp=1").model_flops


def test_messages_that_have_begun_are_waited_for() -> None:
    found = summary("fsdp=2", prefetch=1)
    items = found.micro.items
    begun = [i for i, item in enumerate(items) if isinstance(item.work, Message) and item.work.asynchronous]
    waited = [item.work.message for item in items if isinstance(item.work, Wait)]
    assert begun and sorted(waited) == begun
    for position, item in enumerate(items):
        if isinstance(item.work, Wait):
            assert item.work.message < position


def test_offloaded_state_is_brought_and_returned() -> None:
    kept, away = summary("fsdp=2"), summary("fsdp=2", offload=("state",))
    moved = {"to device": 0, "to host": 0}
    for item in away.update.items:
        if isinstance(item.work, Transfer):
            moved[item.work.direction] += item.work.bytes
    gone = kept.held["optimizer state"] - away.held["optimizer state"]
    assert moved["to device"] == moved["to host"] == gone > 0
    assert away.held["optimizer state"] < 0.02 * kept.held["optimizer state"]
