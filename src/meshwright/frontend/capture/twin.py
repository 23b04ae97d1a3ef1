"""A twin of the user's optimizer: the same class and settings on other parameters, to be run or traced."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.compiler.diagnostics import error

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@dataclass(frozen=True)
class Owner:
    """Which parameter group of which optimizer owns a parameter; ``group`` counts over all optimizers."""

    optimizer: torch.optim.Optimizer
    local_group: int
    group: int


def optimizer_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def owners(model: nn.Module, optimizers: Optimizers) -> dict[str, Owner]:
    """The owner of each parameter that an optimizer holds, by canonical name. Raises E0253 for foreign ones."""
    names = {id(p): n for n, p in model.named_parameters()}
    found: dict[str, Owner] = {}
    first = 0
    for optimizer in optimizer_list(optimizers):
        for local, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise error(
                        "E0253",
                        f"{type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} "
                        "that is not the model's",
                        action="make the optimizer from model.parameters() of the very model that is captured",
                    )
                found[name] = Owner(optimizer, local, first + local)
        first += len(optimizer.param_groups)
    return found


def twin(
    optimizer: torch.optim.Optimizer,
    groups: Mapping[int, list[Tensor]],
    settings: Callable[[int, dict[str, Any]], dict[str, Any]],
) -> torch.optim.Optimizer:
    """The optimizer on other parameters, by group, with empty state; ``settings(group index, group)`` overrides."""
    hooks = [h for h in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks") if getattr(optimizer, h, None)]
    if hooks:
        raise error(
            "E0253",
            f"{type(optimizer).__name__} has step hooks, which would not run in the compiled step",
            action="remove the hooks before the step is captured",
        )
    made = type(optimizer).__new__(type(optimizer))
    # learning-rate schedulers replace `step` on the instance by one bound to the original
    made.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in ("step", "zero_grad")})
    made.state = defaultdict(dict)
    made._optimizer_step_pre_hooks = OrderedDict()
    made._optimizer_step_post_hooks = OrderedDict()
    made.param_groups = []
    for index, parameters in groups.items():
        group = {k: v for k, v in optimizer.param_groups[index].items() if k != "params"}
        group.update({k: False for k in ("foreach", "fused", "differentiable") if k in group})
        group.update(settings(index, group))
        made.param_groups.append({**group, "params": parameters})
    return made


class TensorScalars(TorchFunctionMode):
    """Lets optimizers written for a number ``lr`` run with a tensor: ``p.add_(g, alpha=-lr)`` and
    ``p.addcdiv_(a, b, value=-lr)`` would read the number on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("add", "add_", "sub", "sub_") and isinstance(kwargs.get("alpha"), Tensor):
            first, second = args
            return func(first, second * kwargs.pop("alpha"), **kwargs)
        if name in ("addcdiv", "addcdiv_", "addcmul", "addcmul_") and isinstance(kwargs.get("value"), Tensor):
            first, second, third = args
            return func(first, second * kwargs.pop("value"), third, **kwargs)
        return func(*args, **kwargs)
