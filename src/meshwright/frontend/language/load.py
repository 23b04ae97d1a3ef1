"""`load`: from a `.mw` file to the module, its loss, the train section and the pins of the plan."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import Diagnostic, Span, error, suggestion
from meshwright.frontend.language import tree
from meshwright.frontend.language.block import Block
from meshwright.frontend.language.build import (
    Classes,
    LanguageModule,
    build,
    declared_parameters,
    forward_source,
    initialize,
    patterns_of,
)
from meshwright.frontend.language.checker import Checked, check
from meshwright.frontend.language.initial import draw
from meshwright.frontend.language.parallel import ParallelSection, check_parameters, read_parallel
from meshwright.frontend.language.parser import parse
from meshwright.frontend.language.sizes import Dimensions, dimensions, repeats
from meshwright.frontend.language.train import TrainSection, read_train
from meshwright.frontend.language.vocabulary import lookup_axis

SETTINGS = ("batch", "steps", "seed", "clip", "checkpoint every")


@dataclass(frozen=True)
class LoadedFile:
    """A checked `.mw` file. Modules are made on demand; nothing is allocated before."""

    path: str
    name: str
    dimensions: Dimensions
    train: TrainSection | None
    parallel: ParallelSection | None
    warnings: tuple[Diagnostic, ...]
    checked: Checked
    classes: Classes
    vocabulary: Mapping[str, int]

    def module(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LanguageModule:
        """The model as an ordinary module, filled from the seed unless on the meta device."""
        block = self.checked.model
        return self._filled(build(block, self.classes, self.classes.of(block), device, dtype), device)

    def loss_module(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LanguageModule:
        """The same parameters under the same names; ``forward(**batch)`` is the scalar loss."""
        if self.checked.loss is None:
            raise error(
                "E0220",
                "the file has no 'train' section, so no loss",
                Span(self.path, 1, 1),
                "add 'train' with a 'loss'",
            )
        kind = self.classes.loss(self.checked.model, self.checked.loss)
        return self._filled(build(self.checked.model, self.classes, kind, device, dtype), device)

    def _filled(self, module: LanguageModule, device: str) -> LanguageModule:
        if device != "meta":
            initialize(module, self.seed)
        return module

    @property
    def seed(self) -> int:
        return self.train.seed if self.train else 0

    def initial_value(self, name: str, seed: int | None = None) -> Tensor:
        """The whole first value of one parameter, float32: for whoever materialises shards."""
        parameter = declared_parameters(self.checked.model)[name]
        return draw(parameter.initial, name, parameter.shape, self.seed if seed is None else seed)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Patterns of the module paths that the `parallel` section recomputes (``layers.*.attention``)."""
        names = self.parallel.recompute if self.parallel else ()
        return tuple(dict.fromkeys(p for name in names for p in patterns_of(self.checked.model, name)))

    @property
    def parameter_axes(self) -> dict[str, tuple[str, ...]]:
        """The named axis of every dim of every parameter."""
        return {name: p.axes for name, p in declared_parameters(self.checked.model).items()}

    def example_batch(self, device: str = "cpu") -> dict[str, Tensor]:
        """Inputs of the global batch's shape; on the CPU, random ones that the model accepts."""
        sizes = {**self.dimensions.sizes, self.dimensions.batch: self.train.batch if self.train else 2}
        generator = None if device == "meta" else torch.Generator(device).manual_seed(self.seed)
        batch = {}
        for one in self.checked.inputs:
            shape = tuple(sizes[axis] for axis in one.shape.names)
            if one.kind is not None and one.kind.name == "int":
                high = self.vocabulary.get(one.name.name, 2)
                value = torch.randint(high, shape, device=device, generator=generator)
            else:
                value = torch.randn(shape, device=device, generator=generator)
            batch[one.name.name] = value
        return batch

    def source(self) -> str:
        """The generated Python of every forward, for reading."""
        blocks: dict[str, Block] = {}

        def collect(block: Block) -> None:
            for child in block.children:
                collect(child.block)
            blocks.setdefault(block.name, block)

        collect(self.checked.model)
        texts = [f"class {b.name}:\n" + _indented(forward_source(b)) for b in blocks.values()]
        if self.checked.loss is not None:
            texts.append(f"class {self.name}_loss({self.name}):\n" + _indented(forward_source(self.checked.loss)))
        return "\n\n".join(texts) + "\n"


def load(path: str, overrides: Mapping[str, float] | None = None) -> LoadedFile:
    """Read and check a file. ``overrides`` replace, by name, sizes of axes, counts of `repeat`, and the numbers
    of `train` (``batch``, ``steps``, ``seed``, ``clip``, ``checkpoint every``)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) and fault.strerror else "it is not UTF-8 text"
        raise error("E0109", f"cannot read '{path}': {reason}", None, "give the path of a '.mw' file") from None
    return load_text(text, path, overrides)


def load_text(text: str, path: str, overrides: Mapping[str, float] | None = None) -> LoadedFile:
    """Like :func:`load`, for text at hand; ``path`` names it in errors and is where imports and data are looked for."""
    file = parse(text, path)
    changed = dict(overrides or {})
    _check_overrides(file, changed)
    sizes = dimensions(file, changed)
    folder = Path(path).parent
    imported = _imported(file, folder)
    checked = check(file, sizes, imported)
    assert file.model is not None
    functions = {f.name.name: f for f in file.functions}
    rows = {i.name.name: lookup_axis(file.model, i.name.name, functions) for i in file.model.inputs}
    vocabulary = {name: sizes.sizes[axis] for name, axis in rows.items() if axis is not None}
    smallest = min(vocabulary.values(), default=None)
    train = read_train(file.train, sizes, folder, smallest, changed) if file.train else None
    parallel: ParallelSection | None = None
    warnings: tuple[Diagnostic, ...] = ()
    if file.parallel is not None:
        bodies = [f.body for f in (*file.functions, file.model)]
        repeated = [r.name.name for body in bodies for r in repeats(body)]
        parallel = read_parallel(file.parallel, sizes, (*functions, *repeated))
        warnings = tuple(_without_effect(parallel, checked.model))
        check_parameters(parallel, {n: p.axes for n, p in declared_parameters(checked.model).items()})
    return LoadedFile(
        path, file.model.name.name, sizes, train, parallel, warnings, checked, Classes(path, imported), vocabulary
    )


def _without_effect(parallel: ParallelSection, model: Block) -> Iterator[Diagnostic]:
    """Of functions that are to be recomputed, that the model does not call them."""
    for name, span in parallel.recompute.items():
        if not patterns_of(model, name):
            message = f"'recompute {name}' has no effect: the model does not call '{name}'"
            yield Diagnostic("W0201", message, span, "call it, or remove it from the line")


def _check_overrides(file: tree.File, overrides: Mapping[str, float]) -> None:
    """Every override must name something and be a value that could be written there."""
    assert file.axes is not None and file.model is not None
    axes = [a.name.name for a in file.axes.axes if a.role is None or a.role.name != "batch"]
    bodies = [f.body for f in (*file.functions, file.model)]
    known = (*axes, *(r.name.name for body in bodies for r in repeats(body)), *SETTINGS)
    for name, value in overrides.items():
        if name not in known:
            raise error("E0210", f"nothing named '{name}' can be overridden", None, suggestion(name, known))
        least = 0 if name == "seed" else 1
        if name == "clip" and value <= 0:
            raise error("E0219", f"'clip' is overridden by {value:g}", None, "pass a number above zero")
        if name != "clip" and (value != int(value) or value < least):
            raise error("E0219", f"'{name}' is overridden by {value:g}", None, f"pass a whole number from {least} on")


def _imported(file: tree.File, folder: Path) -> dict[str, object]:
    """The user's functions named by `use`; their modules are also looked for next to the file."""
    found: dict[str, object] = {}
    sys.path.insert(0, str(folder.resolve()))
    try:
        for use in file.uses:
            try:
                module = importlib.import_module(use.module.name)
            except Exception as fault:  # whatever the user's module raises is told, not thrown
                reason = f"{type(fault).__name__}: {fault}"
                raise error(
                    "E0225",
                    f"cannot import '{use.module.name}': {reason}",
                    use.module.span,
                    "correct the module's name",
                ) from None
            for word in use.names:
                if not callable(getattr(module, word.name, None)):
                    names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
                    action = suggestion(word.name, names)
                    raise error("E0225", f"'{use.module.name}' has no function '{word.name}'", word.span, action)
                if word.name in found:
                    raise error("E0213", f"'{word.name}' is imported twice", word.span, "remove one of the two")
                found[word.name] = getattr(module, word.name)
    finally:
        sys.path.remove(str(folder.resolve()))
    return found


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
