"""``meshwright.transform``: the local module on virtual ranks gives what the module gave on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import meshwright
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.mesh import Mesh, Sharding, parse_sharding
from tests.partitioned import collective_names, on_ranks

MESH = Mesh((("data", 2), ("tensor", 2)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        q, k, v = (y.unflatten(-1, (4, 2)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        return {"y": y, "size": y.square().mean()}


def whole_inputs(exported: torch.export.ExportedProgram, *user: Tensor) -> dict[str, Tensor]:
    """What the graph's placeholders take, by name."""
    signature = exported.graph_signature
    held = {**exported.state_dict, **exported.constants}
    order = iter(user)
    return {spec.arg.name: next(order) if spec.target is None else held[spec.target] for spec in signature.input_specs}


def run(module: fx.GraphModule, mesh: Mesh, inputs: Mapping[str, Any]) -> list[Tensor]:
    """The outputs, assembled from the ranks' by the shardings that the module's own annotations say."""
    places = module.graph.find_nodes(op="placeholder")
    shardings = [annotation(p).sharding for p in places]
    (output,) = module.graph.find_nodes(op="output")
    made = [annotation(n).sharding for n in pytree.tree_leaves(output.args[0])]
    return on_ranks(module, mesh, list(inputs.values()), shardings, made)


def check(
    module: nn.Module,
    x: Tensor,
    inputs: Mapping[str, str | Sharding],
    mesh: Mesh = MESH,
    **options: Any,
) -> fx.GraphModule:
    exported = torch.export.export(module, (x,))
    local = meshwright.transform(exported.graph_module, mesh=mesh, inputs=inputs, **options)
    expected = pytree.tree_leaves(module(x))
    found = run(local, mesh, whole_inputs(exported, x))
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right.detach(), rtol=1e-12, atol=1e-12)
    return local


def mlp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Mlp().double(), torch.randn(4, 5, 6, dtype=torch.float64)


CUT = {"x": "[4@data, 5, 6]", "p_up_weight": "[10@tensor, 6]", "p_up_bias": "[10@tensor]"}
CUT["p_down_weight"] = "[6, 10@tensor]"


def test_an_exported_module() -> None:
    local = check(*mlp(), CUT)
    assert collective_names(local) == ["all_reduce", "all_gather"]  # the rows of down; the batch of the result
    for node in local.graph.nodes:
        if node.op == "placeholder":
            sharding = annotation(node).sharding
            assert sharding is not None
            assert str(sharding) == CUT.get(node.name, str(Sharding.whole(sharding.shape)))
            assert annotation(node).shape == sharding.local_shape(MESH) == tuple(node.meta["val"].shape)
    assert any(annotation(n).origin.file == __file__ for n in local.graph.nodes)


def test_outputs_left_in_shards_by_number_or_name() -> None:
    module, x = mlp()
    local = check(module, x, CUT, outputs={0: "[4@data, 5, 6]"})
    assert collective_names(local) == ["all_reduce"]
    (output,) = torch.export.export(module, (x,)).graph_module.graph.find_nodes(op="output")
    name = output.args[0][0].name
    local = check(module, x, CUT, outputs={name: parse_sharding("[4@data, 5@tensor, 6]")})
    assert str(annotation(local.graph.find_nodes(op="output")[0].args[0][0]).sharding) == "[4@data, 5@tensor, 6]"


def test_an_output_may_owe() -> None:
    graph = make_fx(lambda x: (x.sum(0),))(torch.ones(4, 3))
    local = meshwright.transform(graph, mesh=MESH, inputs={"x_1": "[4@data, 3]"}, outputs={0: "[3] +data"})
    assert collective_names(local) == []
    local = meshwright.transform(graph, mesh=MESH, inputs={"x_1": "[4@data, 3]"})
    assert collective_names(local) == ["all_reduce"]


def test_sequence_sharding() -> None:
    module, x = mlp()
    x = torch.cat([x, x[:, :3]], 1)
    local = check(module, x, {**CUT, "x": "[4@data, 8, 6]"}, sequence=("tensor",))
    assert "reduce_scatter" in collective_names(local)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_nested_outputs_and_heads(ranks: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    mesh = Mesh((("tensor", ranks),))
    cut = {"p_qkv_weight": "[3*4@tensor*2, 8]", "p_qkv_bias": "[3*4@tensor*2]", "p_out_weight": "[8, 4@tensor*2]"}
    local = check(Attention().double(), x, cut, mesh)
    # the exported graph itself returns a flat tuple
    assert isinstance(local.graph.find_nodes(op="output")[0].args[0], tuple)


def test_sizes_that_do_not_divide() -> None:
    module, x = mlp()
    check(module, x, {"x": "[4, 5@a, 6]", "p_up_weight": "[10@b, 6]", "p_down_weight": "[6, 10@b]"},
          Mesh((("a", 3), ("b", 3))))  # fmt: skip


def test_attributes_numbers_and_nesting_stay() -> None:
    """A module that keeps a tensor as attribute, takes a number besides tensors, and returns a dict."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

        def forward(self, x: Tensor, number: int, y: Tensor) -> dict[str, Any]:
            return {"a": [x @ self.weight * number, None], "b": y + 1}

    module = Held()
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    graph = fx.Graph()
    places = [graph.placeholder(n) for n in ("x", "number", "y")]
    weight = graph.get_attr("weight")
    product = graph.call_function(torch.ops.aten.mm.default, (places[0], weight))
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (product, places[1]))
    more = graph.call_function(torch.ops.aten.add.Tensor, (places[2], 1))
    graph.output({"a": [scaled, None], "b": more})
    local = meshwright.transform(
        fx.GraphModule(module, graph),
        mesh=MESH,
        inputs={"x": "[4@data, 6@tensor]", "y": "[4@data, 2]"},
        example_inputs=(x, 3, y),
    )
    assert [n.name for n in local.graph.find_nodes(op="placeholder")] == ["x", "number", "y"]
    whole = {"x": x, "number": 3, "y": y}
    shardings = [annotation(n).sharding for n in local.graph.find_nodes(op="placeholder")]
    found = on_ranks(
        local, MESH, list(whole.values()), shardings, [Sharding.whole((4, 4)), None, Sharding.whole((4, 2))]
    )
    right = module(x, 3, y)
    torch.testing.assert_close(found[0], right["a"][0].detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[2], right["b"], rtol=1e-12, atol=1e-12)
    returned = local.graph.find_nodes(op="output")[0].args[0]
    assert set(returned) == {"a", "b"} and returned["a"][1] is None


def compress(module: fx.GraphModule) -> fx.GraphModule:
    """The pass of the documentation: every all-reduce in half the bytes."""
    cast = torch.ops.aten._to_copy.default
    for node in module.graph.find_nodes(op="call_function", target=collectives.all_reduce):
        x, axes, reduction = node.args
        with module.graph.inserting_before(node):
            half = module.graph.call_function(cast, (x,), {"dtype": torch.bfloat16})
        node.args = (half, axes, reduction)
        with module.graph.inserting_after(node):
            wide = module.graph.call_function(cast, (node,), {"dtype": torch.float64})
        node.replace_all_uses_with(wide, delete_user_cb=lambda user, wide=wide: user is not wide)
    module.recompile()
    return module


def test_a_pass_of_ones_own() -> None:
    module, x = mlp()
    exported = torch.export.export(module, (x,))
    local = meshwright.transform(exported.graph_module, mesh=MESH, inputs=CUT, passes=[compress])
    (found,) = run(local, MESH, whole_inputs(exported, x))
    difference = (found - module(x)).abs().max()
    assert 1e-6 < difference < 5e-2  # as bf16 rounds


def test_a_pass_that_breaks_a_shape_is_found_out() -> None:
    def halve(module: fx.GraphModule) -> fx.GraphModule:
        (node,) = module.graph.find_nodes(op="call_function", target=collectives.all_reduce)
        node.target, node.args = collectives.shard, (node.args[0], 0, node.args[1])
        module.recompile()
        return module

    module, x = mlp()
    with pytest.raises(Exception, match="verify_shapes"):
        meshwright.transform(torch.export.export(module, (x,)).graph_module, mesh=MESH, inputs=CUT, passes=[halve])


def test_a_traced_gradient() -> None:
    """A graph that somebody traced with forward and backward in it; the formula of the norm writes into a tensor."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        w = w.detach().requires_grad_()
        loss = F.normalize(x @ w, dim=-1)[:, 0].sum()
        (gradient,) = torch.autograd.grad(loss, (w,))
        return loss.detach(), gradient

    torch.manual_seed(0)
    x, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    graph = make_fx(function)(x, w)
    before = graph.code
    local = meshwright.transform(graph, mesh=MESH, inputs={"x_1": "[6@data, 4@tensor]", "w_1": "[4@tensor, 3]"})
    for got, right in zip(run(local, MESH, {"x": x, "w": w}), function(x, w), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    assert graph.code == before


def refused(inputs: Mapping[str, Any], **options: Any) -> Diagnostic:
    module, x = mlp()
    given: dict[str, Any] = {"graph_module": torch.export.export(module, (x,)).graph_module, "mesh": MESH, **options}
    with pytest.raises(MeshwrightError) as caught:
        meshwright.transform(given.pop("graph_module"), inputs=inputs, **given)
    (found,) = caught.value.diagnostics
    assert found.message and found.action
    return found


@pytest.mark.parametrize(
    ("inputs", "code", "said"),
    [
        ({"p_up_weigth": "[10@tensor, 6]"}, "E0330", "p_up_weight"),
        ({"x": "[4@data 5, 6]"}, "E0317", "4@data 5"),
        ({"x": "4, 5, 6"}, "E0317", "4, 5, 6"),
        ({"x": "[4@dta, 5, 6]"}, "E0315", "'data'"),
        ({"x": "[4, 5, 6] +dta"}, "E0315", "'data'"),
        ({"x": "[4@data, 5@data, 6]"}, "E0316", "twice"),
        ({"x": "[4@data, 6]"}, "E0304", "[4, 5, 6]"),
        ({"x": Sharding.whole((4, 5))}, "E0304", "[4, 5, 6]"),
    ],
)
def test_inputs_that_do_not_fit(inputs: dict[str, Any], code: str, said: str) -> None:
    found = refused(inputs)
    assert found.code == code and said in found.message + found.action


def test_other_refusals() -> None:
    assert refused({}, outputs={3: "[4, 5, 6]"}).code == "E0330"
    assert refused({}, outputs={"none": "[4, 5, 6]"}).code == "E0330"
    assert refused({}, sequence=("time",)).code == "E0315"
    assert refused({}, example_inputs=(1, 2)).code == "E0331"
    bare = fx.symbolic_trace(mlp()[0])
    assert refused({}, graph_module=bare).code == "E0332"
    empty = make_fx(lambda x: x + 1)(torch.ones(3))
    for node in empty.graph.nodes:
        node.meta.pop("val", None)
    assert refused({}, graph_module=empty).code == "E0331"
    dropping = torch.export.export(nn.Dropout(0.5).train(), (torch.ones(3),)).graph_module
    assert refused({}, graph_module=dropping).code == "E0251"


def test_dropout_with_a_key_of_ones_own() -> None:
    def function(x: Tensor, key: Tensor) -> Sequence[Tensor]:
        return [torch.ops.meshwright.dropout(x, key, 0.5, 3, [], [])]

    x, key = torch.randn(6, 5, dtype=torch.float64), torch.tensor([1, 2])
    graph = make_fx(function)(x, key)
    local = meshwright.transform(graph, mesh=MESH, inputs={"x_1": "[6@data, 5@tensor]"})
    (found,) = run(local, MESH, {"x": x, "key": key})
    assert torch.equal(found, function(x, key)[0])
