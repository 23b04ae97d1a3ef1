"""Keep optimizer state in the host's memory, and bring each tensor of it to the device for its update.

FX in, FX out, on the update graph of a rank: a state tensor comes in on the host, ``to_device`` copies it where the
update needs it, and ``to_host`` writes the new value back. The update runs one parameter after the other, so that
at any moment the device holds the state of one parameter. Small tensors (step counters, state of biases) stay on the
device: a copy has a latency whatever it carries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from meshwright.compiler.analysis.offloading import TO_DEVICE, TO_HOST
from meshwright.compiler.analysis.storage import tensor_bytes
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.plan import Offload

LEAST = 1024
"""Bytes on a rank below which a tensor stays on the device."""


def offload(local: LocalGraph, kinds: tuple[Offload, ...], least: int = LEAST) -> LocalGraph:
    """The same update with its state on the host. Needs shapes in ``meta["val"]``; those of the new nodes are left to
    :func:`verify_shapes`. A graph that keeps its state elsewhere already stays as it is."""
    if "state" not in kinds:
        return local
    graph = local.module.graph
    inputs = dict(zip(local.signature.inputs, graph.find_nodes(op="placeholder"), strict=True))
    (output,) = graph.find_nodes(op="output")
    results = dict(zip(local.signature.outputs, output.args[0], strict=True))
    for value, store in inputs.items():
        made = results.get(value)
        if value.kind != "state" or not isinstance(made, fx.Node) or made is store:
            continue
        if store.users and _size(store) >= least:
            like = inputs.get(Value("parameter", value.name.partition("/")[0])) or next(_others(inputs))
            results[value] = _bring_and_return(graph, store, made, like)
    output.args = (tuple(results[v] for v in local.signature.outputs),)
    graph.lint()
    local.module.recompile()
    return local


def _bring_and_return(graph: fx.Graph, store: fx.Node, made: fx.Node, like: fx.Node) -> fx.Node:
    """Let everything that reads ``store`` read a copy on the device; returns the store with ``made`` in it."""
    readers = [u for u in store.users if u.op != "output"]
    first = min(readers, default=made)
    # both inputs stand before whatever reads the copy
    with graph.inserting_before(first if first > like else like.next):
        brought = graph.call_function(TO_DEVICE, (store, like))
    for reader in readers:
        reader.replace_input_with(store, brought)
    with graph.inserting_after(made):
        returned = graph.call_function(TO_HOST, (store, made))
    brought.meta = {"meshwright": replace(annotation(store), phase="update", block=annotation(made).block)}
    returned.meta = {"meshwright": replace(annotation(store), phase="update", block=annotation(made).block)}
    return returned


def _size(node: fx.Node) -> int:
    return sum(tensor_bytes(node))


def _others(inputs: dict[Value, fx.Node]) -> Iterator[fx.Node]:
    """Inputs that are on the device for certain: parameters, gradients."""
    return (n for v, n in inputs.items() if v.kind in ("parameter", "gradient"))
