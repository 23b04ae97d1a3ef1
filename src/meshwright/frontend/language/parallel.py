"""The optional `parallel` section: what the author fixes about the plan, each pin with its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.compiler.diagnostics import MeshwrightError, Span, error, nearest, suggestion
from meshwright.compiler.plan import Declaration
from meshwright.compiler.separability_text import declarations
from meshwright.frontend.language import tree
from meshwright.frontend.language.sizes import Dimensions, positive

STORED = ("weights", "gradients", "state")


@dataclass(frozen=True)
class Placement:
    """Something that lies on mesh axes (outermost first), with the place that says so."""

    on: tuple[str, ...]
    span: Span


@dataclass(frozen=True)
class ParallelSection:
    """Pins of the plan; what is None or absent is free.

    ``mesh`` gives mesh axes and sizes in order. ``shard`` maps named axes of tensors, ``storage`` maps ``weights``,
    ``gradients`` and ``state`` to mesh axes; sharded weights imply sharded gradients and state.
    """

    mesh: tuple[tuple[str, int], ...] = ()
    mesh_span: Span | None = None
    shard: Mapping[str, Placement] = field(default_factory=dict)
    storage: Mapping[str, Placement] = field(default_factory=dict)
    sequence: Placement | None = None
    microbatches: int | None = None
    microbatches_span: Span | None = None
    recompute: Mapping[str, Span] = field(default_factory=dict)
    """Functions and repeats whose values are computed again in backward."""
    separability: tuple[Declaration, ...] = ()
    """What couplings of samples mean in microbatches."""


def read_parallel(section: tree.Parallel, dimensions: Dimensions, blocks: tuple[str, ...]) -> ParallelSection:
    """Check the pins. ``blocks`` are the names of functions and repeats."""
    mesh, mesh_span = _mesh(section, dimensions)
    names = tuple(name for name, _ in mesh)
    shard: dict[str, Placement] = {}
    storage: dict[str, Placement] = {}
    sequence: Placement | None = None
    microbatches: tuple[int, Span] | None = None
    recompute: dict[str, Span] = {}
    separability: tuple[tuple[Declaration, ...], Span] | None = None
    for pin in section.pins:
        placement = Placement(tuple(_mesh_axis(word, names, pin) for word in pin.on), pin.span)
        match pin.kind:
            case "shard":
                for subject in pin.subjects:
                    _place(subject, placement, shard, storage, dimensions)
            case "sequence":
                if sequence is not None:
                    raise _twice(pin, "sequence", sequence.span.line)
                sequence = placement
            case "microbatches":
                if microbatches is not None:
                    raise _twice(pin, "microbatches", microbatches[1].line)
                microbatches = (positive(pin.values[0], dimensions.constants, "the number of microbatches"), pin.span)
            case "separability":
                if separability is not None:
                    raise _twice(pin, "separability", separability[1].line)
                separability = (_declarations(pin), pin.span)
            case "recompute":
                for word in pin.subjects:
                    if word.name not in blocks:
                        message = f"unknown function or repeat '{word.name}'"
                        raise error("E0210", message, word.span, suggestion(word.name, blocks))
                    recompute.setdefault(word.name, word.span)
    return ParallelSection(
        mesh,
        mesh_span,
        shard,
        storage,
        sequence,
        microbatches[0] if microbatches else None,
        microbatches[1] if microbatches else None,
        recompute,
        separability[0] if separability else (),
    )


def _declarations(pin: tree.Pin) -> tuple[Declaration, ...]:
    """What texts such as "global" or "gpt.mw:31=global" declare. Raises E0765."""
    texts = [value.value for value in pin.values if isinstance(value, tree.Text)]
    if len(texts) < len(pin.values):
        message = "what couplings of samples mean is said as text"
        raise error("E0765", message, pin.span, 'write separability "global", say')
    try:
        return declarations(texts)
    except MeshwrightError as fault:
        (found,) = fault.diagnostics
        raise error(found.code, found.message, pin.span, found.action) from None


def check_parameters(section: ParallelSection, parameter_axes: Mapping[str, tuple[str, ...]]) -> None:
    """No mesh axis may cut two dims of one parameter."""
    for name, axes in parameter_axes.items():
        cut: dict[str, str] = {}
        for axis in axes:
            placement = section.shard.get(axis)
            for mesh_axis in placement.on if placement else ():
                if placement is not None and mesh_axis in cut:
                    message = (
                        f"'{mesh_axis}' would cut both '{cut[mesh_axis]}' and '{axis}' of {name}[{' '.join(axes)}]"
                    )
                    action = f"shard '{cut[mesh_axis]}' or '{axis}' on another mesh axis"
                    raise error("E0224", message, placement.span, action)
                cut[mesh_axis] = axis


def _mesh(section: tree.Parallel, dimensions: Dimensions) -> tuple[tuple[tuple[str, int], ...], Span | None]:
    mesh: list[tuple[str, int]] = []
    span = None
    for pin in section.pins:
        if pin.kind != "mesh":
            continue
        if span is not None:
            raise _twice(pin, "mesh", span.line)
        span = pin.span
        for word, size in zip(pin.subjects, pin.values, strict=True):
            if word.name in dict(mesh):
                raise error("E0224", f"mesh axis '{word.name}' is declared twice", word.span, "give it another name")
            if word.name == "micro":
                raise error("E0224", "'micro' is the name of the microbatch axis", word.span, "give it another name")
            mesh.append((word.name, positive(size, dimensions.constants, f"the size of mesh axis '{word.name}'")))
    return tuple(mesh), span


def _mesh_axis(word: tree.Word, names: tuple[str, ...], pin: tree.Pin) -> str:
    if word.name in names:
        if [w.name for w in pin.on].count(word.name) > 1:
            raise error("E0224", f"mesh axis '{word.name}' stands twice here", word.span, "name it once")
        return word.name
    close = nearest(word.name, names)
    action = f"did you mean '{close}'?" if close else f"declare it in this section: 'mesh {word.name} = N'"
    raise error("E0224", f"unknown mesh axis '{word.name}'", word.span, action)


def _place(
    subject: tree.Word,
    placement: Placement,
    shard: dict[str, Placement],
    storage: dict[str, Placement],
    dimensions: Dimensions,
) -> None:
    """Record one subject of a ``shard`` line: stored tensors by kind, or an axis."""
    name = subject.name
    into = shard if name in dimensions.words else storage
    if name not in dimensions.words and name not in STORED:
        known = (*dimensions.axes, *STORED)
        raise error("E0201", f"unknown axis '{name}'", subject.span, suggestion(name, known))
    if name in into:
        raise error(
            "E0224",
            f"'{name}' is sharded in line {into[name].span.line} already",
            subject.span,
            "name all its mesh axes in one line",
        )
    into[name] = placement


def _twice(pin: tree.Pin, kind: str, line: int) -> Exception:
    return error("E0106", f"a second '{kind}'", pin.span, f"keep this one or the one in line {line}")
