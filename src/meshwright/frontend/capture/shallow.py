"""Capture a deep model by its first layers: what the others do is known from them.

Of every list of layers only a prefix is kept while the step is captured, long enough to hold two layers of every kind.
Whether layers are alike is read off a rehearsal (see :mod:`rehearsal`), so that a layer that behaves by its number is
seen to; and the shallow model is rehearsed as well, so that a forward pass that goes wrong, or another way, with fewer
layers is seen too. Then the whole model is captured instead.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.compiler import collector
from meshwright.compiler.analysis.blocks import Folded, Unknown, fold
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.plan import Precision
from meshwright.frontend.capture import batch as batches
from meshwright.frontend.capture.batch import Step
from meshwright.frontend.capture.capture import capture
from meshwright.frontend.capture.rehearsal import Made, Record, Rehearsal, list_of, rehearse
from meshwright.frontend.capture.stand_in import casts
from meshwright.frontend.capture.twin import Optimizers, optimizer_list, owners

COPIES = 2
"""Layers of each kind that are captured, if not said otherwise."""
Layers = nn.ModuleList | nn.Sequential


@dataclass(frozen=True)
class Cut:
    """A list of layers of which the first ``kept`` are captured; ``absent``: by captured layer, the further ones
    that are like it. Paths are those of the user's model."""

    path: str
    kept: int
    absent: Mapping[str, tuple[str, ...]]


@collector.rarely()
def capture_folded(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizers = None,
    loss: Callable[..., Any] | None = None,
    clip: float | None = None,
    scalars: Sequence[str] = ("lr",),
    batch_dims: Mapping[str, int | None] | None = None,
    precision: Precision | None = None,
    copies: int = COPIES,
) -> Folded:
    """What ``fold(capture(...))`` gives, without capturing all layers where that can be avoided.

    Takes and raises what :func:`capture` does. ``copies`` of each kind of layer are captured, at least: as many as
    the treatments of a plan that take turns (see :meth:`Folded.refold`).
    """

    def captured() -> Any:
        return capture(model, batch, optimizer, loss, clip, scalars, batch_dims, precision)

    with contextlib.suppress(Unknown, MeshwrightError):
        cuts = find_cuts(model, batch, optimizer, loss, precision, copies)
        if cuts:
            with shallow(model, cuts, optimizer):
                program = captured()
            return fold(program, absent={block: names for cut in cuts for block, names in cut.absent.items()})
    return fold(captured())


@contextlib.contextmanager
def shallow(model: nn.Module, cuts: Sequence[Cut], optimizer: Optimizers = None) -> Iterator[None]:
    """Within the context the model has the first layers of each cut list alone, and the optimizer no parameters of the
    others."""
    lists = [(cut, model.get_submodule(cut.path)) for cut in cuts]
    modules = [(layers, layers._modules) for _, layers in lists]
    groups = [(group, group["params"]) for one in optimizer_list(optimizer) for group in one.param_groups]
    try:
        for cut, layers in lists:
            layers._modules = dict(list(layers._modules.items())[: cut.kept])
        left = {id(p) for p in model.parameters()}
        for group, parameters in groups:
            group["params"] = [p for p in parameters if id(p) in left]
        yield
    finally:
        for layers, children in modules:
            layers._modules = children
        for group, parameters in groups:
            group["params"] = parameters


def find_cuts(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizers = None,
    loss: Callable[..., Any] | None = None,
    precision: Precision | None = None,
    copies: int = COPIES,
) -> tuple[Cut, ...]:
    """The lists of layers that may be cut, the outermost ones; none if the model does not bear it."""
    lists = _lists(model, copies)
    if not lists:
        return ()
    compute = casts(precision or Precision(), model).compute
    call = batches.as_call(batch)
    found = batches.tensors(call)
    groups = {name: owner.group for name, owner in owners(model, optimizer).items()}

    def rehearsed() -> Rehearsal:
        layers = {n: m for n, m in model.named_modules() if list_of(n) in lists}
        return rehearse(Step(model, loss, batch), call, found, compute, layers)

    try:
        whole = rehearsed()
        cuts = tuple(_cuts(model, lists, whole, groups, copies))
        with shallow(model, cuts):
            less = rehearsed()
    except Exception:  # whatever it is, capture will tell
        return ()
    return cuts if _agree(cuts, whole, less) else ()


def _lists(model: nn.Module, copies: int) -> list[str]:
    """The paths of lists with more than ``copies`` layers, none of which is elsewhere in the model as well."""
    times = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, Layers) and len(module) > copies and all(times[id(m)] == 1 for m in module.children())
    ]


def _cuts(
    model: nn.Module, lists: Sequence[str], whole: Rehearsal, groups: Mapping[str, int], copies: int
) -> Iterator[Cut]:
    called = list(whole.layers)
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    done: list[str] = []
    for path in lists:
        if any(path.startswith(f"{outer}.") for outer in done):
            continue
        layers = dict(model.get_submodule(path).named_children())
        names = [f"{path}.{name}" for name in layers]
        if [name for name in called if name in set(names)] != names or whole.repeated & set(names):
            continue
        kinds = _kinds(
            {n: (whole.layers[n], _weights(n, m, groups)) for n, m in zip(names, layers.values(), strict=True)}
        )
        kept = _prefix(kinds, copies)
        if any(_tapped(names, i, whole) for i in range(kept, len(names) - 1)):
            continue
        shared = any(uses[id(p)] > 1 for layer in list(layers.values())[kept:] for p in layer.parameters())
        if kept < len(names) and not shared:
            done.append(path)
            yield Cut(path, kept, _absent(names, kinds, kept))


def _kinds(layers: Mapping[str, tuple[Record, Hashable]]) -> list[Hashable]:
    """The kind of each layer: what it is made of, what it does, and which of the values that several layers are given
    it is given (a mask, of two). What another layer makes, or what one alone is given, is its stream."""
    alike: dict[Hashable, list[Record]] = {}
    what = {name: (tuple(record.ops), weights) for name, (record, weights) in layers.items()}
    for name, (record, _) in layers.items():
        alike.setdefault(what[name], []).append(record)
    times = {
        key: [Counter(slot) for slot in zip(*(r.given for r in found), strict=True)] for key, found in alike.items()
    }

    def shared(name: str, record: Record) -> Hashable:
        pairs = zip(record.given, times[what[name]], strict=True)
        streams = ((isinstance(g, Made) and g.layers == list_of(name)) or n[g] == 1 for g, n in pairs)
        return tuple("stream" if stream else g for stream, g in zip(streams, record.given, strict=True))

    return [(what[name], shared(name, record)) for name, (record, _) in layers.items()]


def _tapped(names: Sequence[str], at: int, whole: Rehearsal) -> bool:
    """Whether anything but the next layer reads what a layer makes."""
    return any(layer == names[at] and reader != names[at + 1] for layer, reader in whole.reads)


def _weights(name: str, layer: nn.Module, groups: Mapping[str, int]) -> Hashable:
    """Class, weights and their parameter groups of a layer, buffers included."""
    tensors: list[tuple[str, torch.Tensor, int]] = [
        (n, t, groups.get(f"{name}.{n}", -1)) for n, t in layer.named_parameters()
    ]
    tensors += [(n, t, -1) for n, t in layer.named_buffers()]
    return type(layer), tuple((n, tuple(t.shape), t.dtype, t.requires_grad, g) for n, t, g in tensors)


def _prefix(kinds: Sequence[Hashable], copies: int) -> int:
    """The shortest prefix with ``copies`` layers of each kind, or all there are of it."""
    seen: Counter[Hashable] = Counter()
    needed = 0
    for i, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] <= copies:
            needed = i + 1
    return needed


def _absent(names: Sequence[str], kinds: Sequence[Hashable], kept: int) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for kind in dict.fromkeys(kinds[:kept]):
        present = [n for n, k in zip(names[:kept], kinds, strict=False) if k == kind]
        others = tuple(n for n, k in zip(names[kept:], kinds[kept:], strict=True) if k == kind)
        if others:
            found[present[-1]] = others
    return found


def _agree(cuts: Sequence[Cut], whole: Rehearsal, less: Rehearsal) -> bool:
    """Whether the shallow model does what the whole one does, but for the layers that it lacks."""
    lists = {cut.path for cut in cuts}
    return less.outside(lists) == whole.outside(lists) and all(
        record.ops == whole.layers[path].ops and record.given == whole.layers[path].given
        for path, record in less.layers.items()
        if list_of(path) in lists
    )
