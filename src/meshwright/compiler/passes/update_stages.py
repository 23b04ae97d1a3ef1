"""Cut a rank's ``update`` graph by stages: each updates its own weights, and hands over what others need of it.

What has inputs of several stages is either small, such as the global norm made of the norms of all gradients: then
every stage computes it for itself from what the others tell; or it is the sum of a tied weight's gradients, which
belongs to the first of the stages. The graph runs in *rounds*, between which stages hand values over.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.passes.stages import Assigned

SMALL = 1 << 16
"""Elements up to which a value is computed by every stage."""


def assign_update(graph: fx.Graph, roles: Mapping[fx.Node, Value], weights: Mapping[str, int], stages: int) -> Assigned:
    """Give every node its stage and round. ``weights``: by parameter, the stage that holds it."""
    found = Assigned(stages)
    stage: dict[fx.Node, int | None] = {}
    rounds: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            stage[node] = _holder(roles[node], weights)
            rounds[node] = 0
            if (holder := stage[node]) is not None:
                found.of[node] = holder, 0
        elif node.op == "call_function":
            sources = {stage[n] for n in node.all_input_nodes} - {None}
            if len(sources) == 1:
                (stage[node],) = sources
            elif not sources or _elements(node) <= SMALL:
                stage[node] = None
            else:
                stage[node] = min(s for s in sources if s is not None)
            rounds[node] = max((rounds[n] + _later(stage[n], stage[node]) for n in node.all_input_nodes), default=0)
    _postpone(graph, stage, rounds)
    for node, own in stage.items():
        if own is not None and node.op == "call_function":
            found.of[node] = own, rounds[node]
    found.rounds = max(rounds.values(), default=0) + 1
    return found


def rounds_of(found: Assigned) -> tuple[int, ...]:
    """The rounds, in order."""
    return tuple(range(found.rounds))


def _holder(value: Value, weights: Mapping[str, int]) -> int | None:
    if value.kind in ("parameter", "gradient"):
        return weights[value.name]
    if value.kind == "state":
        return weights[value.name.rpartition("/")[0]]
    return None


def _postpone(graph: fx.Graph, stage: Mapping[fx.Node, int | None], rounds: dict[fx.Node, int]) -> None:
    """What a stage makes for itself is made in the round that reads it, so that it need not be kept between rounds."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or stage[node] is None or any(user.op == "output" for user in node.users):
            continue
        latest = [rounds[u] - int(stage[u] != stage[node]) for u in node.users]
        rounds[node] = max(rounds[node], min(latest, default=rounds[node]))


def _later(source: int | None, target: int | None) -> int:
    """Whether a value may have to be handed over on this way."""
    return int(source is not None and source != target)


def _elements(node: fx.Node) -> int:
    count = 1
    for size in annotation(node).shape:
        count *= size
    return count
