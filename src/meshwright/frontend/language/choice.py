"""A thing of torch chosen by name with keyword arguments: an optimizer or a learning-rate schedule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from meshwright.compiler.diagnostics import Span, error, suggestion
from meshwright.frontend.language import tree
from meshwright.frontend.language.sizes import Dimensions, constant

OWN_SCHEDULES = {
    "cosine": ("warmup", "steps", "final"),
    "linear": ("warmup", "steps", "final"),
    "constant": ("warmup",),
}


@dataclass(frozen=True)
class Choice:
    """``AdamW(lr = 3e-4)``: a name and keyword arguments, with the place where it was written."""

    name: str
    keywords: Mapping[str, Any] = field(default_factory=dict)
    span: Span | None = None


def read_choice(setting: tree.Setting, dimensions: Dimensions, what: str) -> Choice:
    """``Name`` or ``Name(keyword = value, ...)``."""
    match setting.value:
        case tree.Name(name, span):
            return Choice(name, {}, span)
        case tree.Call(tree.Word(name, span), arguments, _):
            keywords: dict[str, Any] = {}
            for argument in arguments:
                if argument.keyword is None:
                    raise error(
                        "E0211", f"the arguments of {what} have names", argument.span, "write 'keyword = value'"
                    )
                if argument.keyword.name in keywords:
                    raise error(
                        "E0211", f"'{argument.keyword.name}' is given twice", argument.span, "remove one of the two"
                    )
                keywords[argument.keyword.name] = constant(argument.value, dimensions.constants)
            return Choice(name, keywords, span)
    assert setting.value is not None
    raise error("E0219", f"this is no {what}", setting.value.span, "write 'Name(keyword = value, ...)'")


def optimizers() -> dict[str, type[Optimizer]]:
    """The optimizers of torch.optim that work step by step, by name."""
    return {
        name: value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value not in (Optimizer, torch.optim.LBFGS)
    }


def schedulers() -> dict[str, type[lr_scheduler.LRScheduler]]:
    """The schedules of torch.optim.lr_scheduler that need the optimizer alone, by name."""
    return {
        name: value
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, lr_scheduler.LRScheduler)
        and not name.startswith("_")
        and name
        not in ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler", "LambdaLR", "MultiplicativeLR")
    }


def check_optimizer(setting: tree.Setting, choice: Choice) -> None:
    """The name must be known, its arguments accepted by torch."""
    known = optimizers()
    if choice.name not in known:
        raise error(
            "E0218",
            f"torch.optim has no optimizer '{choice.name}' that works step by step",
            choice.span,
            suggestion(choice.name, known),
        )
    _check_keywords(setting, choice, known[choice.name], skip=1)
    _try(choice, lambda: known[choice.name](_parameters(), **dict(choice.keywords)))


def check_schedule(setting: tree.Setting, choice: Choice) -> None:
    """One of our own or of torch.optim.lr_scheduler, with arguments that it takes."""
    if choice.name in OWN_SCHEDULES:
        for argument in _arguments(setting):
            word = argument.keyword
            if word is not None and word.name not in OWN_SCHEDULES[choice.name]:
                raise error(
                    "E0211",
                    f"'{choice.name}' has no argument '{word.name}'",
                    word.span,
                    suggestion(word.name, OWN_SCHEDULES[choice.name]),
                )
            value = choice.keywords[word.name] if word is not None else None
            whole = word is not None and word.name != "final"
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or value < 0
                or (whole and value != int(value))
            ):
                raise error(
                    "E0219",
                    f"'{argument.keyword.name if argument.keyword else ''}' must be a number not below zero",
                    argument.span,
                    "correct the number",
                )
        return
    known = schedulers()
    if choice.name not in known:
        raise error(
            "E0218",
            f"unknown learning-rate schedule '{choice.name}'",
            choice.span,
            suggestion(choice.name, {*known, *OWN_SCHEDULES}),
        )
    _check_keywords(setting, choice, known[choice.name], skip=1)
    _try(choice, lambda: known[choice.name](torch.optim.SGD(_parameters(), lr=1.0), **dict(choice.keywords)))


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2, 2))]


def _arguments(setting: tree.Setting) -> tuple[tree.Argument, ...]:
    return setting.value.arguments if isinstance(setting.value, tree.Call) else ()


def _check_keywords(setting: tree.Setting, choice: Choice, kind: type, skip: int) -> None:
    accepted = list(inspect.signature(kind).parameters)[skip:]
    for argument in _arguments(setting):
        word = argument.keyword
        if word is not None and word.name not in accepted:
            raise error(
                "E0211", f"'{choice.name}' has no argument '{word.name}'", word.span, suggestion(word.name, accepted)
            )


def _try(choice: Choice, make: Any) -> None:
    """Let torch judge the values; what it says becomes the error."""
    try:
        make()
    except (ValueError, TypeError, RuntimeError) as fault:
        reason = str(fault).splitlines()[0]
        raise error(
            "E0219", f"'{choice.name}' does not accept its arguments: {reason}", choice.span, "correct the arguments"
        ) from None
