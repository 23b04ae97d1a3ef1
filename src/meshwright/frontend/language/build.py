"""From blocks to an ordinary ``nn.Module``: parameters, children, and a forward compiled from generated Python."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.frontend.language import operations
from meshwright.frontend.language.block import Block, Child, Parameter
from meshwright.frontend.language.initial import draw


class LanguageModule(nn.Module):
    """Base of all modules built from a file; ``parameters_of_file`` are the block's own parameters by name."""

    parameters_of_file: Mapping[str, Parameter]


def forward_source(block: Block, name: str = "forward") -> str:
    """The generated Python of a block's forward, for reading."""
    lines = [f"def {name}(self{''.join(f', {i}' for i in block.inputs)}):"]
    return "\n".join(lines + [f"    {code}" for _, code in block.lines])


def _forward(block: Block, path: str, imported: Mapping[str, object]) -> Callable[..., Any]:
    """The compiled forward. Its lines are those of the `.mw` file, so traces and errors show that file."""
    parsed = ast.parse(forward_source(block))
    function = parsed.body[0]
    assert isinstance(function, ast.FunctionDef)
    for statement, (line, _) in zip(function.body, block.lines, strict=True):
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                node.lineno = node.end_lineno = line  # type: ignore[attr-defined]  # every located node has both
    function.lineno = function.end_lineno = block.line
    namespace: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "operations": operations,
        "imported": SimpleNamespace(**imported),
    }
    exec(compile(parsed, path, "exec"), namespace)  # our own code, made from checked names
    made: Callable[..., Any] = namespace["forward"]
    return made


class Classes:
    """One module class per block, made once; building a module from them is then cheap."""

    def __init__(self, path: str, imported: Mapping[str, object]) -> None:
        self._path = path
        self._imported = imported
        self._made: dict[str, type[LanguageModule]] = {}

    def of(self, block: Block) -> type[LanguageModule]:
        if block.name not in self._made:
            members = {
                "forward": _forward(block, self._path, self._imported),
                "parameters_of_file": {p.name: p for p in block.parameters},
                "__doc__": f"`{block.name}` of {self._path}, line {block.line}.",
                "__module__": __name__,
            }
            self._made[block.name] = type(block.name, (LanguageModule,), members)
        return self._made[block.name]

    def loss(self, model: Block, loss: Block) -> type[LanguageModule]:
        """The model's class with the loss as forward; the model's own forward is ``predict``."""
        base = self.of(model)
        members = {
            "forward": _forward(loss, self._path, self._imported),
            "predict": base.forward,
            "__module__": __name__,
        }
        return type(f"{model.name}_loss", (base,), members)


def build(
    block: Block, classes: Classes, kind: type[LanguageModule], device: str, dtype: torch.dtype
) -> LanguageModule:
    """A module of class ``kind`` with the parameters and children of ``block``, not yet filled."""
    module = kind()
    for parameter in block.parameters:
        value = torch.empty(parameter.shape, device=device, dtype=dtype)
        module.register_parameter(parameter.name, nn.Parameter(value))
    for child in block.children:
        module.add_module(child.attribute, _child(child, classes, device, dtype))
    return module


def _child(child: Child, classes: Classes, device: str, dtype: torch.dtype) -> nn.Module:
    kind = classes.of(child.block)
    if child.count is None:
        return build(child.block, classes, kind, device, dtype)
    return nn.ModuleList(build(child.block, classes, kind, device, dtype) for _ in range(child.count))


def declared_parameters(block: Block, prefix: str = "") -> dict[str, Parameter]:
    """Every parameter of the built module by its dotted name, in the order of ``named_parameters``."""
    found = {prefix + p.name: p for p in block.parameters}
    for child in block.children:
        if child.count is None:
            found.update(declared_parameters(child.block, f"{prefix}{child.attribute}."))
        else:
            for number in range(child.count):
                found.update(declared_parameters(child.block, f"{prefix}{child.attribute}.{number}."))
    return found


def patterns_of(block: Block, name: str, prefix: str = "") -> tuple[str, ...]:
    """The module paths at which a function is called or a repeat stands, with ``*`` for the number of a copy."""
    found: list[str] = []
    for child in block.children:
        path = prefix + child.attribute + (".*" if child.count is not None else "")
        named = child.attribute if child.count is not None else child.block.name
        found += [path] if named == name else patterns_of(child.block, name, f"{path}.")
    return tuple(found)


def initial_values(module: nn.Module) -> dict[str, Parameter]:
    """The parameters of a module built from a file, by dotted name, with how each is filled."""
    return {
        f"{path}.{name}" if path else name: parameter
        for path, part in module.named_modules()
        if isinstance(part, LanguageModule)
        for name, parameter in part.parameters_of_file.items()
    }


@torch.no_grad()
def initialize(module: nn.Module, seed: int) -> nn.Module:
    """Fill every parameter of a built module in place; a value depends on ``seed`` and its name alone."""
    parameters = dict(module.named_parameters())
    for name, declared in initial_values(module).items():
        parameters[name].copy_(draw(declared.initial, name, declared.shape, seed))
    return module


def initial_value(module: nn.Module, name: str, seed: int) -> Tensor:
    """The whole first value of one parameter, without the others; the module may be on the meta device."""
    declared = initial_values(module)[name]
    return draw(declared.initial, name, declared.shape, seed)
