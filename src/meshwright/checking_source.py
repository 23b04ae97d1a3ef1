"""What ``meshwright check`` is pointed at: a ``.mw`` file, a factory, or the folder of an artefact."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.compiler.diagnostics import MeshwrightError, Origin, error
from meshwright.compiler.emit.artefact import read_artefact
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.plan import Declaration
from meshwright.frontend.factory import Untrained, given_by_factory
from meshwright.frontend.language.load import LoadedFile, load, load_text
from meshwright.frontend.source import Source, factory_named, load_source

NO_STEP = "E0220"
"""What is said of a file without a ``train`` section: a model alone, which is no fault."""


@dataclass(frozen=True)
class Given:
    """A model with a batch and the dims of rows and positions, and the artefact compiled of it, if there is one."""

    place: str
    source: str
    model: Callable[..., Any]
    batch: Any
    batch_dim: int | None = 0
    time_dim: int = 1
    segments: str | None = None
    artefact: Path | None = None
    overrides: Mapping[str, float] = field(default_factory=dict)
    declared: tuple[Declaration, ...] = ()
    """What was said of couplings of samples, besides what the source or the plan says."""
    returned: Source | Untrained | None = None
    """What a factory returned; None for a file."""

    @property
    def origin(self) -> Origin:
        """Where it is written: the factory, or the beginning of the file. The file is empty where that is not known."""
        if self.source.endswith(".mw"):
            return Origin("", self.source, 1)
        named = factory_named(self.source)
        function = getattr(sys.modules.get(named[0]), named[1], None) if named is not None else None
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        return Origin("", code.co_filename, code.co_firstlineno) if code is not None else Origin()

    @cached_property
    def step(self) -> StepProgram | Compiled:
        """The step that trains the model: of an artefact what its ranks run, else that for one device.

        Raises MeshwrightError if there is none, or it cannot be captured.
        """
        if self.artefact is not None:
            return read_artefact(self.artefact).rank_program
        return self._loaded.capture()

    @property
    def made_anew(self) -> Source | None:
        """What an artefact's factory makes now, which may be other than what was compiled; None: there is no factory,
        or no artefact."""
        return None if self.artefact is None or factory_named(self.source) is None else self._loaded

    @cached_property
    def _loaded(self) -> Source:
        return self.returned if isinstance(self.returned, Source) else load_source(self.source, self.overrides)

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        """What couplings of samples were declared to mean: by the plan of an artefact and then here, or here or else by
        the source."""
        step = self.step
        if not isinstance(step, StepProgram):
            return (*step.plan.separability, *self.declared)
        return self.declared or self._loaded.separability

    @cached_property
    def fault(self) -> MeshwrightError | None:
        """Why the step cannot be captured; None: it can be, or there is none."""
        return None if self.without_step is not None else self._refused

    @cached_property
    def without_step(self) -> str | None:
        """Why there is no step; None: there is one, if maybe one that cannot be captured."""
        if self.artefact is None and isinstance(self.returned, Untrained):
            return self.returned.why
        none = self._refused is not None and self._refused.diagnostics[0].code == NO_STEP
        return self._refused.diagnostics[0].message if self._refused is not None and none else None

    @cached_property
    def _refused(self) -> MeshwrightError | None:
        try:
            _ = self.step
        except MeshwrightError as fault:
            return fault
        return None


def read_given(
    source: str,
    overrides: Mapping[str, float] | None = None,
    segments: str | None = None,
    batch_dim: int | None = None,
    time_dim: int | None = None,
) -> Given:
    """Read a source. Raises MeshwrightError for one that cannot be used."""
    folder = Path(source)
    if source.endswith(".mw"):
        return replace(_of_file(load(source, overrides), segments), overrides=dict(overrides or {}))
    if source and folder.is_dir():  # Path("") is the folder at hand
        described = read_artefact(folder).source
        if described.kind == "language":
            return _of_file(load_text(described.text, described.place, described.overrides), segments, folder)
        if described.kind == "factory":
            source, overrides = described.place, described.overrides
        else:
            raise error(
                "E0710",
                f"{folder} was compiled of a model in memory, which is not there any more",
                action="call meshwright.check(model, batch) where the model is made",
            )
    named = factory_named(source)
    if named is None:
        raise error(
            "E0710",
            f"'{source}' names nothing to check",
            action="give a '.mw' file, a factory as package.module:factory, or the folder of an artefact",
        )
    returned = given_by_factory(*named, dict(overrides or {}))
    return Given(
        str(folder) if folder.is_dir() else source,
        source,
        returned.model,
        returned.batch,
        0 if batch_dim is None else batch_dim,
        1 if time_dim is None else time_dim,
        segments,
        folder if folder.is_dir() else None,
        dict(overrides or {}),
        returned=returned,
    )


def _of_file(loaded: LoadedFile, segments: str | None, artefact: Path | None = None) -> Given:
    """The model of a file; its axes say which dims are rows and positions."""
    batch, time, place = loaded.dimensions.batch, loaded.dimensions.time, loaded.path
    for one in loaded.checked.inputs:
        names = list(one.shape.names)
        if batch in names and time in names:
            values = loaded.example_batch()
            return Given(
                place if artefact is None else str(artefact),
                place,
                loaded.module(),
                values,
                names.index(batch),
                names.index(time),
                segments,
                artefact,
            )
    raise error(
        "E0710",
        f"no input of {loaded.path} has a batch and a time axis",
        action="declare the axes, as in 't: time = 128'",
    )
