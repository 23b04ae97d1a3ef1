"""Keep a copy in fp32 of weights in half precision that would lose their updates (E0726), as optimizer state.

The optimizer reads and writes ``<parameter>/master`` instead of the weight, with the gradient and its other state in
fp32; the weight is the rounded copy. The new state lies as the optimizer state of its parameter does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.fake import fake_mode, fake_tensor
from meshwright.compiler.graph.program import (
    MASTER_COPY,
    Graph,
    Signature,
    StepProgram,
    TensorSpec,
    Value,
    annotation,
)
from meshwright.compiler.numerics import findings
from meshwright.compiler.numerics.casts import CAST, HALVES
from meshwright.compiler.plan import Numerics

WIDE = torch.float32


def as_policy(program: StepProgram, numerics: Numerics | None) -> StepProgram:
    """The step as it runs under a policy: with master weights where ``safe`` keeps them, else itself. What is compiled,
    priced or counted goes through here; a step that has been through it stays as it is."""
    return with_master_weights(program, losing_weights(program)) if numerics == "safe" else program


def losing_weights(program: StepProgram) -> frozenset[str]:
    """The parameters of which E0726 tells: in half precision alone, with updates that are rounded away."""
    nodes = {node for found in findings(program) if found.code == "E0726" for node in found.nodes}
    made = program.update.outputs()
    return frozenset(
        value.name
        for value, node in made.items()
        if value.kind == "parameter" and isinstance(node, fx.Node) and node.name in nodes
        # an optimizer that has an entry of that name keeps a copy of its own
        if f"{value.name}/{MASTER_COPY}" not in program.state
    )


def with_master_weights(program: StepProgram, names: frozenset[str]) -> StepProgram:
    """The same step, with a copy in fp32 of each of these parameters. Without names, the step itself."""
    if not names:
        return program
    state: dict[str, TensorSpec] = {}
    for name, spec in program.state.items():
        owned = name.rpartition("/")[0] in names and spec.dtype in HALVES
        state[name] = TensorSpec(spec.shape, WIDE) if owned else spec
    for parameter in program.parameters:
        if parameter.name in names:
            state[f"{parameter.name}/{MASTER_COPY}"] = TensorSpec(parameter.spec.shape, WIDE)
    return replace(program, update=_update(program.update, names), state=state)


def _update(graph: Graph, names: frozenset[str]) -> Graph:
    made = fx.GraphModule(torch.nn.Module(), copy.deepcopy(graph.module.graph))
    for old, node in zip(graph.module.graph.nodes, made.graph.nodes, strict=True):
        node.meta = dict(old.meta)
        if "meshwright" in old.meta:
            node.meta["meshwright"] = replace(annotation(old))
    inputs = dict(zip(graph.signature.inputs, made.graph.find_nodes(op="placeholder"), strict=True))
    last = list(inputs.values())[-1]
    masters: dict[str, fx.Node] = {}
    for value, node in list(inputs.items()):
        owner = value.name.rpartition("/")[0] if value.kind == "state" else value.name
        if owner not in names:
            continue
        if value.kind == "parameter":
            with made.graph.inserting_after(last):
                last = made.graph.placeholder(f"state_{node.name}_{MASTER_COPY}")
            last.meta = {**node.meta, "meshwright": replace(annotation(node), dtype=WIDE)}
            last.meta["val"] = fake_tensor(annotation(node).shape, WIDE)
            node.replace_all_uses_with(last)
            masters[owner] = last
        elif value.kind == "state" and annotation(node).dtype in HALVES:
            node.meta["val"] = fake_tensor(annotation(node).shape, WIDE)
            annotation(node).dtype = WIDE
    for value, node in inputs.items():
        if value.kind == "gradient" and value.name in names:
            _read_wide(node, last)
    _round_no_more(made.graph, graph.signature.outputs, names)
    (output,) = made.graph.find_nodes(op="output")
    results = list(output.args[0])
    for index, value in enumerate(graph.signature.outputs):
        if value.kind == "parameter" and value.name in names:
            wide = results[index]
            with made.graph.inserting_before(output):
                results[index] = made.graph.call_function(CAST, (wide,), {"dtype": annotation(inputs[value]).dtype})
            results[index].meta = {"meshwright": replace(annotation(wide))}
            results.append(wide)
    output.args = (tuple(results),)
    _infer(made.graph)
    made.graph.lint()
    made.recompile()
    states = tuple(Value("state", f"{name}/{MASTER_COPY}") for name in masters)
    kept = tuple(
        Value("state", f"{v.name}/{MASTER_COPY}")
        for v in graph.signature.outputs
        if v.kind == "parameter" and v.name in names
    )
    return Graph(made, Signature((*graph.signature.inputs, *states), (*graph.signature.outputs, *kept)))


def _round_no_more(graph: fx.Graph, outputs: Sequence[Value], names: frozenset[str]) -> None:
    """Leave out what rounds gradients, clipped ones say, for the optimizer's arithmetic of these weights alone."""
    (output,) = graph.find_nodes(op="output")
    reach: dict[fx.Node, set[str]] = {node: set() for node in graph.nodes}
    for value, node in zip(outputs, output.args[0], strict=True):
        if isinstance(node, fx.Node):
            owner = value.name.rpartition("/")[0] if value.kind == "state" else value.name
            reach[node].add(owner if value.kind in ("state", "parameter") else "")
    for node in reversed(graph.nodes):
        reach[node].update(*(reach[user] for user in node.users if user is not output))
    for node in graph.find_nodes(op="call_function", target=CAST):
        if node.kwargs.get("dtype") not in HALVES:
            continue
        if reach[node] and reach[node] <= names:
            node.kwargs = {"dtype": WIDE}
            continue
        # one that weights without a copy read too (the factor that clips, say) stays as it is for those
        own = [user for user in node.users if user is not output and reach[user] and reach[user] <= names]
        if own:
            with graph.inserting_after(node):
                wide = graph.call_function(CAST, node.args, {"dtype": WIDE})
            wide.meta = {"meshwright": replace(annotation(node), dtype=WIDE)}
            for user in own:
                user.replace_input_with(node, wide)


def _read_wide(gradient: fx.Node, after: fx.Node) -> None:
    """Let all readers of a gradient have it in fp32, with one cast: one that is there is taken."""
    readers = list(gradient.users)
    with gradient.graph.inserting_after(after):
        wide = gradient.graph.call_function(CAST, (gradient,), {"dtype": WIDE})
    wide.meta = {"meshwright": replace(annotation(gradient), dtype=WIDE, phase="update")}
    for reader in readers:
        if reader.target is CAST and reader.kwargs == {"dtype": WIDE}:
            reader.replace_all_uses_with(wide)
            gradient.graph.erase_node(reader)
        else:
            reader.replace_input_with(gradient, wide)


def _infer(graph: fx.Graph) -> None:
    """The dtypes of all values, of the inputs as they are now."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with fake_mode():
            value = node.meta["val"] = node.target(*args, **kwargs)
        if isinstance(value, Tensor):
            annotation(node).dtype = value.dtype
