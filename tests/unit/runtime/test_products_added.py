"""Gradients of linear layers are added to their accumulators by the product's own kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.compiler.graph.ops import contraction
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.mesh import MICRO, Mesh, Sharding
from meshwright.runtime.accumulate import Accumulator, Product, Taken
from meshwright.runtime.deposit import deposit, deposit_product, runnable
from tests.parity.harness import Cell, Task, compiled

MESH = Mesh((("data", 1),)).with_micro(3)
OWED = Sharding.whole((4, 5)).owing([(MICRO, "sum")])


def parts(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(2, 3, 4, dtype=dtype), torch.randn(2, 3, 5, dtype=dtype)) for _ in range(3)]


@pytest.mark.parametrize(("equation", "turned"), [("abc,abd->cd", False), ("abd,abc->cd", True)])
def test_products_add_up_to_what_their_tensors_do(equation: str, turned: bool) -> None:
    by_product, by_tensor = Accumulator(OWED, MESH), Accumulator(OWED, MESH)
    taken = Taken()
    for microbatch, (x, y) in enumerate(parts()):
        operands = (y, x) if turned else (x, y)
        by_product.add(Product(*contraction.factors(equation, *operands)), taken, microbatch)
        by_tensor.add(torch.einsum(equation, *operands), taken, microbatch)
    torch.testing.assert_close(by_product.take()[0], by_tensor.take()[0], rtol=1e-14, atol=1e-14)


def test_a_total_in_a_wider_dtype_is_as_of_tensors() -> None:
    """A kernel that adds to its result would round each product to half precision first, or refuse."""
    by_product, by_tensor = (Accumulator(OWED, MESH, torch.float32) for _ in range(2))
    taken = Taken()
    for microbatch, (x, y) in enumerate(parts(torch.bfloat16)):
        by_product.add(Product(*contraction.factors("abc,abd->cd", x, y)), taken, microbatch)
        by_tensor.add(torch.einsum("abc,abd->cd", x, y), taken, microbatch)
    total, _ = by_product.take()
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, by_tensor.take()[0], rtol=0, atol=0)


def test_what_a_compiled_step_hands_over() -> None:
    program = compiled(Cell(Task("Llama"), "ddp=2", 2, 2))
    assert isinstance(program, RankProgram)
    graph = runnable(program.micro, deposits=True).graph
    products, others = (graph.find_nodes(op="call_function", target=t) for t in (deposit_product, deposit))
    gradients = [value for value in program.micro.signature.outputs if value.kind == "gradient"]
    matrices = [v for v in gradients if v.name.endswith("_proj.weight")]
    assert len(matrices) == 7 * 2, "query, key, value, output, gate, up and down of two layers"
    assert len(products) >= len(matrices) and len(products) + len(others) == len(gradients)
