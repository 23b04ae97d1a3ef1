"""The same step with other sizes: every op written anew, and run on fake tensors to see that it still fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.equivalence.atoms import Atom, Dim, leaves
from meshwright.compiler.equivalence.sizes import Sizes, sizes_of
from meshwright.compiler.graph.adapter import OpOverload
from meshwright.compiler.graph.fake import fake_mode, fake_tensor
from meshwright.compiler.graph.program import Graph, StepProgram, TensorSpec, Value, annotation

TRIES = 40
"""How often sizes are fixed that turn out to count, before all stay as they are."""


@dataclass(frozen=True)
class Shrunk:
    """A step with new sizes. ``high``: by tensor of the batch, the number below which its integers must be drawn."""

    program: StepProgram
    high: Mapping[str, int]
    kept: tuple[str, ...]
    """Nodes whose sizes stay because their op's values would not fit otherwise."""
    sizes: Sizes
    new: Mapping[Atom, int]

    def shape(self, value: Value) -> tuple[int, ...]:
        """The new shape of an input or output of the step."""
        return tuple(size_of(dim, self.new) for dim in self.sizes.values[value])


class _Unfit(Exception):
    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def size_of(dim: Sequence[Atom], new: Mapping[Atom, int]) -> int:
    """The new size of a dim."""
    count = 1
    for atom in leaves(dim):
        if atom.base is not None:
            base, more = atom.base
            count *= size_of(base, new) + more
        else:
            count *= new.get(atom, atom.size)
    return count


def shrink(program: StepProgram, choose: Any) -> Shrunk:
    """The step with the sizes that ``choose`` gives for the atoms of it (a function of :class:`Sizes`).

    Sizes that an op turns out to depend on stay; what they are is told.
    """
    fixed: dict[str, None] = {}
    for _ in range(TRIES):
        sizes = sizes_of(program, frozenset(fixed))
        new: Mapping[Atom, int] = choose(sizes)
        try:
            made = _written(program, sizes, new)
        except _Unfit as fault:
            fixed[fault.node.name] = None
            continue
        high: dict[str, int] = {}
        for lookup, table in sizes.lookups:
            for name in lookup.batch or ():
                high[name] = min(high.get(name, 1 << 62), size_of(table, new))
        return Shrunk(made, high, tuple(fixed), sizes, new)
    return Shrunk(program, {}, tuple(fixed), sizes_of(program), {})


def _written(program: StepProgram, sizes: Sizes, new: Mapping[Atom, int]) -> StepProgram:
    def spec(value: Value, old: TensorSpec) -> TensorSpec:
        if value not in sizes.values:
            return old
        return TensorSpec(tuple(size_of(d, new) for d in sizes.values[value]), old.dtype)

    batch = {n: spec(Value("batch", n), s) for n, s in program.batch.items()}
    first = next((n for n, d in program.batch_dims.items() if d is not None), None)
    size = program.batch_size
    if first is not None:
        at = program.batch_dims[first]
        assert at is not None
        size = batch[first].shape[at] if Value("batch", first) in sizes.values else size
    return replace(
        program,
        prologue=_graph(program.prologue, sizes, new),
        micro=_graph(program.micro, sizes, new),
        update=_graph(program.update, sizes, new),
        parameters=tuple(replace(p, spec=spec(Value("parameter", p.name), p.spec)) for p in program.parameters),
        buffers={n: spec(Value("buffer", n), s) for n, s in program.buffers.items()},
        batch=batch,
        state={n: spec(Value("state", n), s) for n, s in program.state.items()},
        constants={n: _part(t, sizes.values.get(Value("constant", n)), new) for n, t in program.constants.items()},
        batch_size=size,
        fingerprint="",
    )


def _part(whole: Tensor, dims: list[Dim] | None, new: Mapping[Atom, int]) -> Tensor:
    """The first elements along every atom of a constant."""
    if dims is None:
        return whole
    atoms = [a for dim in dims for a in leaves(dim)]
    x = whole.reshape([a.size for a in atoms])
    for d, atom in enumerate(atoms):
        x = x.narrow(d, 0, size_of([atom], new))
    return x.reshape([size_of(dim, new) for dim in dims]).contiguous()


def _graph(graph: Graph, sizes: Sizes, new: Mapping[Atom, int]) -> Graph:
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def size(dim: Sequence[Atom]) -> int:
        return size_of(dim, new)

    with fake_mode(), torch.no_grad():
        for node in graph.module.graph.nodes:
            copy = copies[node] = made.node_copy(node, copies.__getitem__)
            copy.meta = dict(node.meta)
            if node.op == "output":
                continue
            if node.op == "placeholder":
                shape = tuple(size(d) for d in sizes.dims[node])
                copy.meta["val"] = fake_tensor(shape, node.meta["val"].dtype)
            else:
                if node in sizes.rewrites:
                    copy.args, copy.kwargs = _arguments(copy, sizes.rewrites[node], size)
                copy.meta["val"] = _run(node, copy)
                _check(node, copy.meta["val"], sizes, size)
            value = copy.meta["val"]
            note = annotation(node)
            shape = tuple(value.shape) if isinstance(value, Tensor) else note.shape
            copy.meta["meshwright"] = replace(note, shape=shape)
    made.lint()
    return Graph(fx.GraphModule(graph.module, made), graph.signature)


def _arguments(copy: fx.Node, rewrite: Any, size: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert isinstance(copy.target, OpOverload)
    named = dict(copy.kwargs)
    args = list(copy.args)
    for parameter in copy.target._schema.arguments[len(args) :]:
        if not parameter.kwarg_only:
            args.append(named.pop(parameter.name, parameter.default_value))
    return tuple(rewrite(args, size)), named


def _run(node: fx.Node, copy: fx.Node) -> Any:
    args, kwargs = fx.map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
    try:
        return copy.target(*args, **kwargs)  # type: ignore[operator]  # the target of a call_function node
    except Exception as fault:  # whatever a kernel says of sizes that do not fit
        raise _Unfit(node, str(fault)) from fault


def _check(node: fx.Node, value: Any, sizes: Sizes, size: Any) -> None:
    several = isinstance(value, (list, tuple))
    wanted = sizes.dims[node] if several else [sizes.dims[node]]
    found = value if several else [value]
    for one, dims in zip(found, wanted, strict=True):
        if isinstance(one, Tensor) and dims is not None and tuple(one.shape) != tuple(size(d) for d in dims):
            raise _Unfit(node, f"it gives {tuple(one.shape)}")
