"""What a golden file may name: each pass with how it is applied to the graph of the file's first block.

The settings are lines such as ``mesh: data=2, tensor=2`` at the top of the file. How the values at the border lie is
read from the graph itself: the types of its inputs, and the shardings of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from meshwright.compiler.emit.python import emit_python
from meshwright.compiler.graph.fake import fake_mode
from meshwright.compiler.graph.program import Graph
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.graph.text import print_graph
from meshwright.compiler.graph.text_parser import parse_border, parse_graph, parse_local_graph
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.bucket import bucket
from meshwright.compiler.passes.lower import lower
from meshwright.compiler.passes.offload import offload
from meshwright.compiler.passes.overlap import overlap
from meshwright.compiler.passes.placement import Placement
from meshwright.compiler.passes.propagate import propagate
from meshwright.compiler.passes.recompute import recompute
from meshwright.compiler.passes.verify_owed import verify_owed
from meshwright.compiler.passes.verify_shapes import verify_shapes
from meshwright.compiler.plan import Recompute

Settings = Mapping[str, str]


def read(text: str, settings: Settings) -> str:
    """Nothing but reading and printing."""
    if text.lstrip().startswith("local"):
        name, local = parse_local_graph(text)
        return print_graph(local, name)
    name, graph = parse_graph(text)
    return print_graph(graph, name)


def run_propagate(text: str, settings: Settings) -> str:
    name, graph = parse_graph(text)
    return print_graph(_propagated(text, graph, settings), name)


def partition(text: str, settings: Settings) -> str:
    """Propagate, verify, lower, verify: a graph for one device becomes that of a rank."""
    name, graph = parse_graph(text)
    return print_graph(_lowered(text, graph, settings), name)


def run_bucket(text: str, settings: Settings) -> str:
    name, local = parse_local_graph(text)
    return print_graph(verify_shapes(bucket(local, mesh(settings)), mesh(settings)), name)


def run_overlap(text: str, settings: Settings) -> str:
    name, local = parse_local_graph(text)
    made = overlap(local, mesh(settings), int(settings.get("prefetch", "1")))
    return print_graph(verify_shapes(made, mesh(settings)), name)


def run_recompute(text: str, settings: Settings) -> str:
    """``save`` is one of the words of a plan; the blocks are ``layers.*``."""
    name, graph = parse_graph(text)
    saves = {"nothing": Recompute("layers.*"), "matmuls": Recompute("layers.*", "matmuls")}
    return print_graph(recompute(graph, (saves[settings["save"]],)), name)


def run_offload(text: str, settings: Settings) -> str:
    name, local = parse_local_graph(text)
    return print_graph(verify_shapes(offload(local, ("state",)), mesh(settings)), name)


def python(text: str, settings: Settings) -> str:
    name, local = parse_local_graph(text)
    return emit_python(local, name, settings.get("title", ""))


PASSES: dict[str, Callable[[str, Settings], str]] = {
    "read": read,
    "propagate": run_propagate,
    "partition": partition,
    "bucket": run_bucket,
    "overlap": run_overlap,
    "recompute": run_recompute,
    "offload": run_offload,
    "python": python,
}


def mesh(settings: Settings) -> Mesh:
    """The mesh of the settings, with the microbatches in front if there are any."""
    axes = (item.partition("=") for item in settings["mesh"].replace(" ", "").split(","))
    made = Mesh(tuple((name, int(size)) for name, _, size in axes))
    return made.with_micro(int(settings["microbatches"])) if "microbatches" in settings else made


def _propagated(text: str, graph: Graph, settings: Settings) -> Graph:
    _compute_types(graph)
    inputs, outputs = parse_border(text)
    names = set(settings.get("stored on", "").split())
    storage = {v: frozenset(names) & s.axes for v, s in inputs.items() if v.kind == "parameter"}
    owing = frozenset(v for v in graph.signature.outputs if v.kind in ("loss", "gradient"))
    paid = {v: s.paid() for v, s in outputs.items()}
    sequence = frozenset(settings.get("sequence", "").split())
    made = propagate(graph, mesh(settings), Placement(inputs, paid, owing, storage, paid), sequence=sequence)
    verify_owed(made, mesh(settings))
    return made


def _lowered(text: str, graph: Graph, settings: Settings) -> LocalGraph:
    return verify_shapes(lower(_propagated(text, graph, settings), mesh(settings)), mesh(settings))


def _compute_types(graph: Graph) -> None:
    """Fake values of whole shapes for every node, so that the first block needs types at its inputs only."""
    inputs = [n.meta["val"] for n in graph.module.graph.find_nodes(op="placeholder")]
    with fake_mode(), torch.no_grad():
        _Types(graph.module).run(*inputs)


class _Types(torch.fx.Interpreter):
    def run_node(self, n: torch.fx.Node) -> object:
        result = super().run_node(n)
        note = n.meta.get("meshwright")
        if n.op == "call_function":
            n.meta["val"] = result
            if note is not None and isinstance(result, torch.Tensor):
                note.shape, note.dtype, note.sharding = tuple(result.shape), result.dtype, None
        return result
