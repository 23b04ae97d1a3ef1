"""The module of a row at its own shape, on the meta device, with few layers: of equal ones, one stands for many."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.published.rows import Habits, Shape

DROPOUT = 0.1


class Core(nn.Module):
    """Causal attention of queries to keys and values, ``[b heads t channels]``."""

    def __init__(self, habits: Habits) -> None:
        super().__init__()
        self.fused, self.dropout = habits.fused_attention, DROPOUT if habits.dropout else 0.0

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        # the scores and their softmax as tensors of their own
        t, channels = query.shape[2:]
        seen = torch.ones(t, t, dtype=torch.bool, device=query.device).tril()
        scores = (query @ key.transpose(2, 3)) * channels**-0.5
        weights = scores.masked_fill(~seen, -65504.0).softmax(-1)
        return F.dropout(weights, self.dropout, self.training) @ value


class Attention(nn.Module):
    """Attention with one product for queries, keys and values, head after head (as Megatron-LM lays them)."""

    def __init__(self, shape: Shape, habits: Habits) -> None:
        super().__init__()
        self.heads, self.groups = shape.heads, shape.key_value_heads
        self.channels = shape.hidden // shape.heads
        self.core = Core(habits)
        width = self.channels * (self.heads + 2 * self.groups)
        self.joint = nn.Linear(shape.hidden, width, bias=habits.bias)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=habits.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        shared = self.heads // self.groups
        joint = self.joint(x).view(b, t, self.groups, shared + 2, self.channels)
        query, key, value = joint.split([shared, 1, 1], 3)
        query = query.reshape(b, t, self.heads, self.channels).transpose(1, 2)
        key, value = (x.expand(b, t, self.groups, shared, self.channels) for x in (key, value))
        key, value = (x.reshape(b, t, self.heads, self.channels).transpose(1, 2) for x in (key, value))
        mixed = self.core(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(b, t, width))


class Layer(nn.Module):
    def __init__(self, shape: Shape, habits: Habits) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.hidden, bias=habits.bias)
        self.attention = Attention(shape, habits)
        self.norm_2 = nn.LayerNorm(shape.hidden, bias=habits.bias)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=habits.bias)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=habits.bias)
        self.dropout = nn.Dropout(DROPOUT if habits.dropout else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class Gpt(nn.Module):
    """The decoder of GPT-2, MPT and Megatron-LM: learned positions, the head tied to the embedding."""

    def __init__(self, shape: Shape, habits: Habits, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.time, shape.hidden)
        self.dropout = nn.Dropout(DROPOUT if habits.dropout else 0.0)
        self.layers = nn.ModuleList(Layer(shape, habits) for _ in range(layers))
        self.norm = nn.LayerNorm(shape.hidden, bias=habits.bias)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        where = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.positions(where))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def llama(shape: Shape, habits: Habits, layers: int) -> nn.Module:
    """``transformers``' Llama; with fused norms, ``nn.RMSNorm`` stands in for its own of several ops."""
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.time,
        use_cache=False,
        attn_implementation="sdpa" if habits.fused_attention else "eager",
    )
    model = transformers.LlamaForCausalLM(config)
    if habits.fused_norms:
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if type(child).__name__ == "LlamaRMSNorm":
                    setattr(parent, name, nn.RMSNorm(shape.hidden, eps=1e-5))
    return model


class PlainLoss(nn.Module):
    """A model with a loss that keeps the log-probabilities of all classes in 32 bits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids).logits
        chosen = logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1))
        return -chosen.mean()


def module(shape: Shape, habits: Habits, layers: int) -> nn.Module:
    """The module of a row, in training mode, in the dtype in which its weights lie."""
    with torch.device("meta"):
        made = Gpt(shape, habits, layers) if shape.family == "gpt" else llama(shape, habits, layers)
        made = PlainLoss(made) if habits.loss == "plain" else made
        return made.to(torch.bfloat16 if habits.master_weights else torch.float32).train()


def blocks(shape: Shape, habits: Habits, layers: int) -> tuple[str, ...]:
    """The names of the module's blocks."""
    path = "layers" if shape.family == "gpt" else "model.layers"
    path = f"model.{path}" if habits.loss == "plain" else path
    return tuple(f"{path}.{i}" for i in range(layers))


def attention_core(shape: Shape) -> str:
    """The part of a block that is attention without its products with weights, if there is a module for it."""
    return "attention.core" if shape.family == "gpt" else "self_attn"


def parameters(shape: Shape, habits: Habits) -> int:
    """The parameters of the whole model, counted on a module of one layer: all have as many."""
    made = module(shape, habits, 1)
    (name,) = blocks(shape, habits, 1)
    total = sum(p.numel() for p in made.parameters())
    one = sum(p.numel() for n, p in made.named_parameters() if n.startswith(name + "."))
    return total + one * (shape.layers - 1)


class MasterAdamW(torch.optim.Optimizer):
    """AdamW whose state has the weights in 32 bits beside the moments, for modules in 16 (Megatron-LM, DeepSpeed)."""

    def __init__(self, params: list[Tensor], lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not for training steps
        for group in self.param_groups:
            rate, decay, eps = group["lr"], group["weight_decay"], group["eps"]
            low, high = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    for name in ("master", "exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                grad = p.grad.float()
                state["exp_avg"].lerp_(grad, 1 - low)
                state["exp_avg_sq"].mul_(high).addcmul_(grad, grad, value=1 - high)
                bias = (1 - high ** state["step"]) ** 0.5 / (1 - low ** state["step"])
                denominator = state["exp_avg_sq"].sqrt().add_(eps)
                state["master"].mul_(1 - rate * decay)
                state["master"].sub_(state["exp_avg"] / denominator * (rate * bias))
                p.copy_(state["master"])
