"""Partition a traced function and run it on virtual ranks: what the property and unit tests of passes share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import meshwright.compiler.graph.ops  # noqa: F401  (registers our ops)
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.adapter import write_code
from meshwright.compiler.graph.fake import fake_mode
from meshwright.compiler.graph.program import Graph, Signature, Value
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Mesh, Sharding
from meshwright.compiler.passes.bucket import bucket
from meshwright.compiler.passes.lower import lower
from meshwright.compiler.passes.placement import Placement
from meshwright.compiler.passes.propagate import propagate
from meshwright.compiler.passes.verify_owed import verify_owed
from meshwright.compiler.passes.verify_shapes import verify_shapes
from meshwright.runtime.layout import assemble, take_shard
from meshwright.runtime.rendezvous import Rendezvous
from meshwright.runtime.virtual import VirtualCommunicator, _raise


def traced(function: Callable[..., Sequence[Tensor]], inputs: Mapping[str, Tensor]) -> Graph:
    """The graph of a function of named tensors, its inputs as batch tensors, its outputs as results."""
    with fake_mode() as mode:
        fakes = [mode.from_tensor(t) for t in inputs.values()]
    module = make_fx(lambda *a: tuple(function(*a)), tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    outputs = tuple(Value("result", str(i)) for i in range(len(output.args[0])))
    return Graph(module, Signature(tuple(Value("batch", n) for n in inputs), outputs))


def partition(graph: Graph, mesh: Mesh, shardings: Mapping[str, Sharding], **options: object) -> LocalGraph:
    """Propagate from the given input shardings, verify, lower, verify."""
    placement = Placement({Value("batch", n): s for n, s in shardings.items()}, {}, frozenset(graph.signature.outputs))
    placed = propagate(graph, mesh, placement, **options)  # type: ignore[arg-type]  # options are propagate's own
    verify_owed(placed, mesh)
    local = verify_shapes(lower(placed, mesh), mesh)
    return verify_shapes(bucket(local, mesh), mesh)


def run_on_ranks(local: LocalGraph, mesh: Mesh, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Run a local graph on all ranks of a mesh as threads, and assemble its outputs whole."""
    given = [inputs[v.name] for v in local.signature.inputs]
    lying = [local.inputs[v] for v in local.signature.inputs]
    return on_ranks(local.module, mesh, given, lying, [local.outputs[v] for v in local.signature.outputs])


def on_ranks(
    module: fx.GraphModule,
    mesh: Mesh,
    inputs: Sequence[Any],
    shardings: Sequence[Sharding | None],
    outputs: Sequence[Sharding | None],
) -> list[Any]:
    """Run a module on all ranks of a mesh as threads: inputs are cut as they say (None: given as they are), and the
    outputs, flat, are assembled whole (None: rank 0's)."""
    write_code(module)
    rendezvous = Rendezvous(mesh.ranks)
    results: dict[int, list[Any]] = {}

    def body(rank: int) -> None:
        communicator = VirtualCommunicator(rank, mesh, 1, rendezvous)
        try:
            shards = [
                x if s is None else take_shard(x, s, mesh, mesh.coordinates(rank))
                for x, s in zip(inputs, shardings, strict=True)
            ]
            with collectives.use(communicator), torch.no_grad():
                results[rank] = pytree.tree_leaves(module(*shards), is_leaf=lambda x: x is None)
        except BaseException as failure:
            rendezvous.fail(rank, failure)
        else:
            rendezvous.finish(rank)

    threads = [threading.Thread(target=body, args=(r,)) for r in range(mesh.ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if rendezvous.failure is not None:
        _raise(*rendezvous.failure)
    return [
        results[0][i] if s is None else assemble(lambda c, i=i: results[mesh.rank(c)][i], s, mesh, replicas=True)
        for i, s in enumerate(outputs)
    ]


def collective_names(module: fx.GraphModule) -> list[str]:
    """The communication ops of a local graph, in order."""
    known = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    names = [getattr(n.target, "__name__", "") for n in module.graph.nodes if n.op == "call_function"]
    return [n for n in names if n in known]
