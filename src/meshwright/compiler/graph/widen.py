"""A captured step with every floating dtype replaced, so that equivalence can be measured far below rounding."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.fake import fake_mode, fake_tensor
from meshwright.compiler.graph.program import Annotation, Graph, StepProgram, TensorSpec, annotation


def widen(program: StepProgram, dtype: torch.dtype = torch.float64) -> StepProgram:
    """The same step with all floating tensors, constants and casts in ``dtype``.

    Also models that cast to fp32 inside are then computed in ``dtype`` throughout.
    """

    def spec(s: TensorSpec) -> TensorSpec:
        return TensorSpec(s.shape, _wide(s.dtype, dtype))

    return dataclasses.replace(
        program,
        prologue=_graph(program.prologue, dtype),
        micro=_graph(program.micro, dtype),
        update=_graph(program.update, dtype),
        parameters=tuple(dataclasses.replace(p, spec=spec(p.spec)) for p in program.parameters),
        buffers={n: spec(s) for n, s in program.buffers.items()},
        batch={n: spec(s) for n, s in program.batch.items()},
        state={n: spec(s) for n, s in program.state.items()},
        constants={n: t.to(_wide(t.dtype, dtype)) for n, t in program.constants.items()},
    )


def _wide(found: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return dtype if found.is_floating_point else found


def _graph(graph: Graph, dtype: torch.dtype) -> Graph:
    made = fx.GraphModule(torch.nn.Module(), copy.deepcopy(graph.module.graph))
    for old, node in zip(graph.module.graph.nodes, made.graph.nodes, strict=True):
        before = annotation(old)
        node.meta = dict(old.meta)
        if node.op == "placeholder":
            value = old.meta["val"]
            node.meta["val"] = fake_tensor(value.shape, _wide(value.dtype, dtype))
        elif node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, lambda a: _argument(a, dtype))
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a: _argument(a, dtype))
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with fake_mode():
                node.meta["val"] = node.target(*args, **kwargs)
        else:
            continue
        value = node.meta["val"]
        shape, kind = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (before.shape, before.dtype)
        node.meta["meshwright"] = Annotation(shape, kind, before.sharding, before.origin, before.block, before.phase)
    made.recompile()
    return Graph(made, graph.signature)


def _argument(value: Any, dtype: torch.dtype) -> Any:
    return _wide(value, dtype) if isinstance(value, torch.dtype) else value
