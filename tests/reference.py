"""The truth that compiled steps are compared with: eager PyTorch on one device, in float64 throughout.

Nothing of Meshwright's capture or partitioner is used here, with one exception: dropout draws its
mask from the counter-based op, since a mask is a choice and not a fact.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

LOW = frozenset({torch.float32, torch.bfloat16, torch.float16})

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]


class Widened(TorchDispatchMode):
    """Every cast to, and every creation in, a lower floating dtype is done in float64 instead.

    Models cast to float32 inside (norms, softmax, logits) whatever their weights are.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        widen = lambda x: torch.float64 if isinstance(x, torch.dtype) and x in LOW else x  # noqa: E731 (one expression)
        result = function(*tree_map(widen, args), **tree_map(widen, kwargs or {}))
        # a creation without a dtype takes the default one
        return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.dtype in LOW else x, result)


class CountedDropout(TorchFunctionMode):
    """Dropout, alone and inside attention, with the mask that Meshwright's own op gives to each site."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = key
        self.site = 0

    def drop(self, x: Tensor, p: float) -> Tensor:
        from meshwright.compiler.graph import ops  # noqa: F401 (registers the op)

        mask = torch.ops.meshwright.dropout(torch.ones_like(x), self.key, p, self.site, [], [])
        self.site += 1
        return x * mask

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.dropout:
            return self._dropout(*args, **kwargs)
        if function is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or (len(args) > 4 and args[4])):
            return self._attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self.drop(input, p) if training and p > 0 else input

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The definition in the documentation of ``scaled_dot_product_attention``, with our mask of dropout."""
        if enable_gqa:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        scores = query @ key.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.drop(torch.softmax(scores, -1), dropout_p) @ value


@dataclass(frozen=True)
class Step:
    """What one step on one device gives. Gradients are those before clipping."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def reference_steps(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    optimizer_factory: OptimizerFactory,
    clip: float | None = None,
    seed: int = 0,
) -> list[Step]:
    """Train a float64 copy of ``model`` for one step per batch; parameters by their first name (tied ones once).

    ``seed`` is that of dropout: step ``i`` uses the key ``[seed, i]``.
    """
    model = copy.deepcopy(model).double()
    optimizer = optimizer_factory(model)
    steps = []
    for number, batch in enumerate(batches):
        wide = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
        model.zero_grad()  # not the optimizer: it may own a part of the parameters
        with Widened():
            with CountedDropout(torch.tensor([seed, number])):
                output = model(**wide)
                value = output if isinstance(output, Tensor) else output.loss
            value.backward()
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            norm = clipped(model.parameters(), clip)
            optimizer.step()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        steps.append(Step(value.item(), norm, gradients, weights))
    return steps


def clipped(parameters: Iterable[nn.Parameter], clip: float | None) -> float:
    """Clip by the global norm (where a limit is given) and return the norm before."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, clip if clip is not None else math.inf))
