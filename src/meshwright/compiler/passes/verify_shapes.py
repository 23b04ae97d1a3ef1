"""Run a lowered graph on fake tensors: every value must have the local shape that its sharding says."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.fake import fake_mode, fake_tensor
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Mesh


class _Shapes:
    """A communicator that answers with the right shapes, as rank 0."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def coordinate(self, axis: str) -> int:
        return 0

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str) -> Tensor:
        return torch.empty_like(x)

    def all_reduce_all(self, xs: list[Tensor], axes: tuple[str, ...], reduction: str) -> list[Tensor]:
        return [torch.empty_like(x) for x in xs]

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return x.new_empty((x.shape[0] * self.mesh.size(*axes), *x.shape[1:]))

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return x.new_empty((x.shape[0] // self.mesh.size(*axes), *x.shape[1:]))

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return torch.empty_like(x)


class _Interpreter(fx.Interpreter):
    """Runs each kind of call once: repeated blocks make the same calls on the same shapes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.known: dict[Hashable, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and "val" in n.meta:
            return n.meta["val"]
        result = self._result(n)
        note = annotation(n)
        if isinstance(result, Tensor) and note.sharding is not None:
            if tuple(result.shape) != note.shape:
                raise InternalError(
                    f"verify_shapes: {n.format_node()} gives {tuple(result.shape)}; {note.sharding} wants {note.shape}"
                )
            note.dtype = result.dtype
        n.meta["val"] = result
        return result

    def _result(self, n: fx.Node) -> Any:
        key: Hashable = None
        if n.op == "call_function":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            key = (n.target, _seen(args), _seen(tuple(kwargs.items())))
            if key in self.known:
                return self.known[key]
        try:
            result = super().run_node(n)
        except Exception as fault:
            raise InternalError(f"verify_shapes: {n.format_node()} cannot run on its shards: {fault}") from fault
        if key is not None:
            self.known[key] = result
        return result


def _seen(value: Any) -> Hashable:
    """What a call on fake tensors depends on: types, shapes and strides; numbers and names as they are."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), str(value.device)
    if isinstance(value, (list, tuple)):
        return tuple(_seen(v) for v in value)
    return (type(value), value) if isinstance(value, (bool, int, float)) else value


def verify_shapes(local: LocalGraph, mesh: Mesh) -> LocalGraph:
    """Check every shape that is not known yet, and record it in ``node.meta["val"]``.

    Raises InternalError that names the node.
    """
    nodes = [n for n in local.module.graph.nodes if n.op == "placeholder"]
    inputs = [fake_tensor(annotation(n).shape, annotation(n).dtype or torch.float32) for n in nodes]
    with fake_mode(), collectives.use(_Shapes(mesh)), torch.no_grad():
        _Interpreter(local.module).run(*inputs)
    return local
