"""The user's example batch: which tensors it holds, under which names, and which dim is the batch."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.compiler.diagnostics import error, input_name, suggestion


@dataclass(frozen=True)
class Call:
    """How the model is called: positional and keyword arguments, tensors among them at any depth."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_call(batch: Any) -> Call:
    """A batch as a call: a mapping is keywords, ``(args, kwargs)`` is both, a sequence is positional,
    a tensor is the only argument. Raises E0256 for anything else."""
    if isinstance(batch, Tensor):
        return Call((batch,), {})
    if isinstance(batch, Mapping):
        return Call((), dict(batch))
    if isinstance(batch, (tuple, list)):
        if len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict):
            return Call(batch[0], dict(batch[1]))
        return Call(tuple(batch), {})
    raise error(
        "E0256",
        f"the batch is a {type(batch).__name__}",
        action="give a tuple (positional), a dict (keyword) or (args, kwargs)",
    )


def tensors(call: Call) -> dict[str, Tensor]:
    """The tensors of a call by path: ``input_ids``, ``0``, ``inputs.image``."""
    found: dict[str, Tensor] = {}
    for path, leaf in pytree.tree_flatten_with_path((call.args, call.kwargs))[0]:
        if isinstance(leaf, Tensor):
            found[_name(path[1:])] = leaf
    if not found:
        raise error("E0256", "the batch holds no tensor", action="give an example batch of tensors")
    return found


def fixed(call: Call) -> dict[str, Any]:
    """What a call gives beside tensors, by path: capture makes these values a part of the program."""
    leaves = pytree.tree_flatten_with_path((call.args, call.kwargs))[0]
    return {_name(path[1:]): leaf for path, leaf in leaves if not isinstance(leaf, Tensor)}


def check_fixed(call: Call, captured: Mapping[str, Any]) -> None:
    """Refuse a batch whose numbers and strings are not those that were captured. Raises E0256."""
    given = fixed(call)
    for name in [*captured, *given]:
        before, now = captured.get(name), given.get(name)
        if name not in captured or name not in given or type(before) is not type(now) or before != now:
            raise error(
                "E0256",
                f"{input_name(name)} of the batch is {now!r}; the step was compiled for {before!r}",
                action="give numbers that change from step to step as tensors, or compile for these",
            )


def _name(path: tuple[Any, ...]) -> str:
    parts = []
    for key in path:
        part = getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
        parts.append(str(part))
    return ".".join(parts)


def replace(call: Call, made: Mapping[str, Tensor]) -> Call:
    """The same call with other tensors, by name."""

    def put(path: tuple[Any, ...], leaf: Any) -> Any:
        return made[_name(path[1:])] if isinstance(leaf, Tensor) else leaf

    args, kwargs = pytree.tree_map_with_path(put, (call.args, call.kwargs))
    return Call(args, kwargs)


def batch_dims(
    found: Mapping[str, Tensor], given: Mapping[str, int | None] | None
) -> tuple[int, dict[str, int | None]]:
    """The batch size, and for each tensor the dim that is the batch (None: shared by all samples).

    The size is the one that most tensors have in dim 0. ``given`` says otherwise for the tensors that it names.
    """
    given = _given_dims(found, given)
    sizes = [t.shape[d] for n, t in found.items() if (d := given.get(n)) is not None]
    sizes = sizes or [t.shape[0] for n, t in found.items() if t.dim() and n not in given]
    if not sizes:
        raise error(
            "E0256", "no tensor of the batch has a batch dim", action="say which dim it is: batch_dims={name: dim}"
        )
    size = Counter(sizes).most_common(1)[0][0]
    dims: dict[str, int | None] = {}
    for name, tensor in found.items():
        dims[name] = given[name] if name in given else (0 if tensor.dim() and tensor.shape[0] == size else None)
        dim = dims[name]
        if dim is not None and tensor.shape[dim] != size:
            raise error(
                "E0256",
                f"dim {dim} of {input_name(name)} has {tensor.shape[dim]} samples, "
                f"other tensors of the batch have {size}",
                action="give batch_dims={name: dim} for each tensor, None for one that all samples share",
            )
    return size, dims


def _given_dims(found: Mapping[str, Tensor], given: object) -> dict[str, int | None]:
    """The batch dims that the user names, checked, and counted from the front. Raises E0256."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise error("E0256", f"batch_dims is of type {kind}", action="give a dict, batch_dims={name: dim}")
    checked: dict[str, int | None] = {}
    for key, dim in given.items():
        name = str(key)  # a positional tensor may be named by its number
        if name not in found:
            message = f"batch_dims names '{name}', which is not in the batch"
            raise error("E0256", message, action=suggestion(name, found))
        called, count = input_name(name), found[name].dim()
        if dim is None:
            checked[name] = None
        elif isinstance(dim, bool) or not isinstance(dim, int):
            message = f"batch_dims gives {called} a dim of type {type(dim).__name__}"
            raise error("E0256", message, action="give the number of the dim, or None if all samples share the tensor")
        elif not -count <= dim < count:
            message = f"batch_dims gives {called} the dim {dim}, but its shape is {list(found[name].shape)}"
            choices = ", ".join(map(str, range(count)))
            raise error("E0256", message, action=f"give one of {choices}, or None" if count else "give None")
        else:
            checked[name] = dim % count
    return checked


class Step(nn.Module):
    """The user's model and loss as one module whose output is the loss."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None, batch: Any) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._form = batch
        self._accepts = accepted(model) if loss is not None else None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        model_args, model_kwargs = args, kwargs
        if self._accepts is not None:
            count, takes = self._accepts
            model_args = args[:count]
            model_kwargs = {k: v for k, v in kwargs.items() if takes(k)}
        output = self.model(*model_args, **model_kwargs)
        if self._loss is not None:
            return _checked(self._loss(output, self._batch(args, kwargs)), "the loss function")
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        return _checked(output if found is None else found, "the model")

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The batch in the form in which the user gave it."""
        if isinstance(self._form, Tensor):
            return args[0]
        if isinstance(self._form, Mapping):
            return kwargs
        return (args, kwargs) if kwargs else args


LABELS = "labels"
"""The keyword that a model does not get, unless it requires it, where a loss function reads it: with labels many
models compute a loss of their own and return something else than their outputs."""


def accepted(model: nn.Module) -> tuple[int, Callable[[str], bool]]:
    """What the model gets of a batch when a loss function takes the rest.

    Of positional elements as many as it requires, at least one; of keywords those that it accepts but for
    :data:`LABELS`.
    """
    parameters = inspect.signature(model.forward).parameters
    kinds = inspect.Parameter
    positional = [p for p in parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    count = max(sum(p.default is p.empty for p in positional), 1)
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n for n, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    required = {n for n in named if parameters[n].default is kinds.empty}

    def takes(name: str) -> bool:
        return (every or name in named) and (name != LABELS or name in required)

    return count, takes


def _checked(loss: Any, giver: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise error(
            "E0252",
            f"{giver} gives {what} where a loss (one number) is needed",
            action="let the model return the loss or an object with `.loss`, or give loss=callable(output, batch)",
        )
    if not loss.dtype.is_floating_point:
        raise error("E0252", f"the loss is of dtype {loss.dtype}", action="compute the loss in a floating dtype")
    return loss.reshape(())
