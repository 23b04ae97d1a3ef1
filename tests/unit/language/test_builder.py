"""The built modules: same numbers as PyTorch written by hand and as transformers, same names, same first values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.frontend.language import initial_value, initialize, load, load_text

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = {"t": 12, "d": 16, "h": 4, "c": 4, "f": 24, "vocab": 256, "layers": 2, "batch": 3}


class HandGPT(nn.Module):
    """gpt.mw as one would write it in PyTorch, reading the weights of the built module."""

    def __init__(self, weights: dict[str, Tensor], layers: int) -> None:
        super().__init__()
        self.w, self.layers = weights, layers

    @staticmethod
    def heads(y: Tensor, weight: Tensor) -> Tensor:
        d, h, c = weight.shape
        return (y @ weight.reshape(d, h * c)).unflatten(-1, (h, c)).transpose(1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        w = self.w
        x = w["E"][tokens] + w["P"]
        d = x.shape[-1]
        for i in range(self.layers):
            a, m = f"layers.{i}.attention.", f"layers.{i}.mlp."
            y = F.layer_norm(x, (d,))
            heads = [
                (y @ w[a + n].reshape(d, -1)).unflatten(-1, w[a + n].shape[1:]).transpose(1, 2)
                for n in ("Wq", "Wk", "Wv")
            ]
            q, k, v = heads
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
            x = x + mixed.transpose(1, 2).flatten(2) @ w[a + "Wo"].reshape(-1, d)
            x = x + F.gelu(F.layer_norm(x, (d,)) @ w[m + "W1"]) @ w[m + "W2"]
        return F.layer_norm(x, (d,)) @ w["E"].T


def test_gpt_equals_pytorch_written_by_hand() -> None:
    file = load(str(EXAMPLES / "gpt.mw"), SMALL)
    model, loss = file.module(dtype=torch.float64), file.loss_module(dtype=torch.float64)
    batch = file.example_batch()
    hand = HandGPT(dict(model.named_parameters()), 2)
    expected = hand(batch["tokens"])
    assert (model(**batch) - expected).abs().max() < 1e-12
    by_hand = F.cross_entropy(expected[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())
    assert abs(float(loss(**batch).detach()) - float(by_hand.detach())) < 1e-12
    got = torch.autograd.grad(loss(**batch), list(loss.parameters()))
    want = torch.autograd.grad(by_hand, list(model.parameters()))
    for one, other in zip(got, want, strict=True):
        assert (one - other).abs().max() < 1e-12


def test_llama_equals_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    file = load(str(EXAMPLES / "llama.mw"), {**SMALL, "g": 2})
    ours = file.module(dtype=torch.float64)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    theirs = LlamaForCausalLM(config).double().eval()
    w = {name: p.detach() + 0.1 * torch.randn(p.shape, dtype=p.dtype) for name, p in ours.named_parameters()}
    ours.load_state_dict(w)
    named = {"model.embed_tokens.weight": w["E"], "lm_head.weight": w["Wout"].T, "model.norm.weight": w["scaled.scale"]}
    for i in range(2):
        mine, other = f"layers.{i}.", f"model.layers.{i}."
        named[other + "input_layernorm.weight"] = w[mine + "scaled.scale"]
        named[other + "post_attention_layernorm.weight"] = w[mine + "scaled_2.scale"]
        for a, b in (("Wq", "q"), ("Wk", "k"), ("Wv", "v")):
            named[f"{other}self_attn.{b}_proj.weight"] = w[f"{mine}attention.{a}"].flatten(1).T
        named[other + "self_attn.o_proj.weight"] = w[mine + "attention.Wo"].flatten(0, 1).T
        for a, b in (("Wgate", "gate"), ("Wup", "up"), ("Wdown", "down")):
            named[f"{other}mlp.{b}_proj.weight"] = w[f"{mine}mlp.{a}"].T
    theirs.load_state_dict(named)
    for name in [n for n, _ in theirs.named_modules()]:
        if name.endswith("norm"):  # theirs computes in float32; the same formula in float64
            exact = nn.RMSNorm(16, eps=1e-6, dtype=torch.float64)
            exact.weight.data.copy_(named[f"{name}.weight"])
            theirs.set_submodule(name, exact)
    batch = file.example_batch()
    got, want = ours(**batch), theirs(input_ids=batch["tokens"]).logits
    assert want.std() > 0.1
    assert (got - want).abs().max() < 1e-9


def test_parameters_have_dotted_names_and_axes() -> None:
    file = load(str(EXAMPLES / "llama.mw"))
    names = [name for name, _ in file.module("meta").named_parameters()]
    assert names == list(file.parameter_axes)
    assert file.parameter_axes["layers.3.attention.Wk"] == ("d", "g", "c")
    assert {"E", "Wout", "scaled.scale", "layers.0.scaled.scale", "layers.0.scaled_2.scale"} <= set(names)
    for name, parameter in file.module("meta").named_parameters():
        assert parameter.shape == tuple(file.dimensions.sizes[axis] for axis in file.parameter_axes[name])


def test_loss_module_has_the_names_of_the_model() -> None:
    file = load(str(EXAMPLES / "gpt.mw"))
    model, loss = file.module("meta"), file.loss_module("meta")
    assert list(model.state_dict()) == list(loss.state_dict())


def test_first_values_depend_on_seed_and_name_alone() -> None:
    file = load(str(EXAMPLES / "gpt.mw"), SMALL)
    module, again = file.module(), file.loss_module()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, file.initial_value(name))
        assert torch.equal(parameter, again.get_parameter(name))
        assert torch.equal(parameter, initial_value(file.module("meta"), name, file.seed))
    other = load(str(EXAMPLES / "gpt.mw"), {**SMALL, "layers": 3}).module()
    assert torch.equal(other.get_parameter("layers.1.mlp.W1"), module.get_parameter("layers.1.mlp.W1"))
    assert not torch.equal(module.get_parameter("layers.0.mlp.W1"), module.get_parameter("layers.1.mlp.W1"))
    assert not torch.equal(file.initial_value("E", seed=7), file.initial_value("E"))
    materialised = file.module("meta").to_empty(device="cpu")
    initialize(materialised, file.seed)
    assert all(torch.equal(p, module.get_parameter(n)) for n, p in materialised.named_parameters())


def test_first_values_have_the_declared_distribution() -> None:
    text = """axes
    b: batch
    d = 300, e = 300
model m(x[b d]) -> [b d]
    param M[d e] ~ normal(0.5)
    param T[d e] ~ truncated_normal(0.1)
    param U[d e] ~ uniform(-1, 3)
    param Z[d] ~ zeros
    param C[d] ~ constant(d / 100)
    x + Z + C + sum(M + T + U over e)
"""
    module = load_text(text, "m.mw").module()
    value = {n: p.detach() for n, p in module.named_parameters()}
    assert abs(value["M"].std() - 0.5) < 0.01 and abs(value["M"].mean()) < 0.01
    assert value["T"].abs().max() <= 0.2 and abs(value["T"].std() - 0.1 * 0.8796) < 0.002
    assert value["U"].min() >= -1 and value["U"].max() <= 3 and abs(value["U"].mean() - 1) < 0.02
    assert (value["Z"] == 0).all() and (value["C"] == 3).all()


def test_export_shows_the_file_and_the_module_path() -> None:
    file = load(str(EXAMPLES / "gpt.mw"), SMALL)
    program = torch.export.export(file.loss_module("meta"), (), file.example_batch("meta"), strict=False)
    node = next(n for n in program.graph.nodes if "gelu" in str(n.target))
    path, _ = list(node.meta["nn_module_stack"].values())[-1]
    assert path == "layers.0.mlp"
    last = node.meta["stack_trace"].strip().splitlines()
    assert "gpt.mw" in last[-2] and last[-1].strip().startswith("gelu(x * W1)")
    targets = [str(n.target) for n in program.graph.nodes]
    assert sum("einsum" in t for t in targets) == 6 * 2 + 1
    assert sum("scaled_dot_product_attention" in t for t in targets) == 2
    assert not any("view" in t or "reshape" in t for t in targets if "einsum" in t)


HEAD = "axes\n    b: batch\n    t: time = 10\n    s = 6\n    h = 4, g = 2, c = 4, e = 2\n\n"


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ("v over t", lambda i, j: True),
        ("v, causal over t", lambda i, j: j <= i),
        ("v, causal over t, window = 3", lambda i, j: i - 3 < j <= i),
    ],
)
def test_attend_masks(options: str, mask: object) -> None:
    text = HEAD + f"model m(q[b h t c], k[b g t c], v[b g t e]) -> [b h t e]\n    attend(q, k, {options})\n"
    module = load_text(text, "m.mw").module()
    q, k, v = torch.randn(2, 4, 10, 4), torch.randn(2, 2, 10, 4), torch.randn(2, 2, 10, 2)
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    allowed = torch.tensor([[bool(mask(i, j)) for j in range(10)] for i in range(10)])  # type: ignore[operator]  # a function
    scores = (q @ keys.transpose(-1, -2) / 2).masked_fill(~allowed, -math.inf)
    assert torch.allclose(module(q, k, v), scores.softmax(-1) @ values, atol=1e-6)


def test_attend_across_two_time_axes_and_without_heads() -> None:
    text = HEAD + "model m(q[b t c], k[b s c], v[b s c]) -> [b t c]\n    attend(q, k, v over t, scale = 0.5)\n"
    q, k, v = torch.randn(2, 10, 4), torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    expected = (q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ v
    assert torch.allclose(load_text(text, "m.mw").module()(q, k, v), expected, atol=1e-6)


def test_attend_takes_any_order_of_axes() -> None:
    text = HEAD + "model m(q[b t h c], k[b t h c], v[b t h c]) -> [b t h c]\n    attend(q, k, v, causal over t)\n"
    q, k, v = (torch.randn(2, 10, 4, 4) for _ in range(3))
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    assert torch.allclose(load_text(text, "m.mw").module()(q, k, v), expected, atol=1e-6)


def test_norms_with_parameters_and_over_several_axes() -> None:
    text = (
        HEAD
        + """model m(x[b t c]) -> [b t c]
    param w[c], z[c] ~ normal(1)
    param u[c t] ~ normal(1)
    y = norm(x over c, weight = w, bias = z, eps = 1e-3)
    y + rms_norm(x over t c, weight = u) + softmax(x over t)
"""
    )
    module = load_text(text, "m.mw").module()
    x = torch.randn(2, 10, 4)
    p = dict(module.named_parameters())
    expected = F.layer_norm(x, (4,), p["w"], p["z"], 1e-3) + x.softmax(1)
    expected = expected + x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-5) * p["u"].T
    assert torch.allclose(module(x), expected, atol=1e-5)


def test_dropout_only_in_training() -> None:
    module = load_text(HEAD + "model m(x[b t]) -> [b t]\n    dropout(x, 0.5)\n", "m.mw").module()
    x = torch.ones(4, 10)
    assert set(module(x).unique().tolist()) == {0.0, 2.0}
    assert torch.equal(module.eval()(x), x)


def test_repeat_carries_several_variables_and_nests() -> None:
    text = (
        HEAD
        + """model m(x[b c]) -> [b c]
    param R[c] ~ ones
    y = x * 2
    repeat outer = 2
        param A[c] ~ ones
        y = y + x * A * R
        repeat inner = 3
            param B[c] ~ ones
            x = x + B
    y + x
"""
    )
    module = load_text(text, "m.mw").module()
    names = [n for n, _ in module.named_parameters()]
    assert names == ["R", *(f"outer.{i}.{n}" for i in range(2) for n in ("A", *(f"inner.{j}.B" for j in range(3))))]
    # y = 2x, then + x, then + (x + 3); x ends as x + 6
    x = torch.randn(3, 4)
    assert torch.allclose(module(x), 2 * x + x + (x + 3) + (x + 6), atol=1e-6)


def test_functions_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine_for_language.py").write_text("def twice(x, by=2):\n    return x * by\n")
    text = "use mine_for_language: twice\n" + HEAD + "model m(x[b c]) -> [b c]\n    twice(x) + twice(x, by = 5)\n"
    x = torch.randn(3, 4)
    assert torch.allclose(load_text(text, str(tmp_path / "m.mw")).module()(x), 7 * x)


def test_names_of_python_are_free() -> None:
    text = HEAD + "model m(lambda[b c], self[b c]) -> [b c]\n    torch = lambda - self\n    F = torch * 2\n    F\n"
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.allclose(load_text(text, "m.mw").module()(x, y), (x - y) * 2)
