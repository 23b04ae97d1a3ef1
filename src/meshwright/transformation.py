"""``transform``: an FX module for one device in, the FX module that every rank of a mesh runs out.

    exported = torch.export.export(model, (x,))
    local = meshwright.transform(
        exported.graph_module,
        mesh={"data": 2, "tensor": 2},
        inputs={"x": "[8@data, 16]", "p_up_weight": "[64@tensor, 16]", "p_down_weight": "[16, 64@tensor]"},
    )
    with meshwright.compiler.graph.collectives.use(communicator):  # a ProcessCommunicator, say
        (y,) = local(*shards)

It is the same chain of passes as for a training step, and each is FX in, FX out. A pass of one's own stands

- before all of them, on the module of ATen ops: ``transform(my_pass(graph_module), ...)``;
- between lowering and the joining of messages, where every collective is one node: ``passes=[my_pass]``. The shapes
  are verified again after it. This one sends half of the bytes::

      def compress(module: fx.GraphModule) -> fx.GraphModule:
          for node in module.graph.find_nodes(op="call_function", target=collectives.all_reduce):
              x, axes, reduction = node.args
              with module.graph.inserting_before(node):
                  half = module.graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": torch.bfloat16})
              node.args = (half, axes, reduction)
              with module.graph.inserting_after(node):
                  wide = module.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": torch.float32})
              node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
          module.recompile()
          return module

- between any two others, by calling the passes one by one, as the body of :func:`transform` does: ``propagate``
  (afterwards every change of sharding is a ``redistribute`` node, and the graph still runs on one device), ``lower``,
  ``bucket``, with the verifiers ``verify_owed`` and ``verify_shapes`` wherever one likes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from meshwright.compiler.diagnostics import Diagnostic, DiagnosticWarning, error, suggestion
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Mesh, Sharding, parse_sharding
from meshwright.compiler.passes.bucket import bucket
from meshwright.compiler.passes.lower import lower
from meshwright.compiler.passes.placement import Placement
from meshwright.compiler.passes.propagate import propagate
from meshwright.compiler.passes.verify_owed import verify_owed
from meshwright.compiler.passes.verify_shapes import verify_shapes
from meshwright.frontend.capture.retrace import Retraced, retrace

Pass = Callable[[fx.GraphModule], fx.GraphModule]


def transform(
    graph_module: fx.GraphModule,
    *,
    mesh: Mesh | Mapping[str, int],
    inputs: Mapping[str, str | Sharding],
    outputs: Mapping[str | int, str | Sharding] | None = None,
    sequence: Sequence[str] = (),
    example_inputs: Sequence[Any] | None = None,
    passes: Sequence[Pass] = (),
) -> fx.GraphModule:
    """Partition a graph of ATen (or Meshwright's) ops over a mesh.

    ``mesh`` gives the axes and their sizes, outermost first. ``inputs`` says by placeholder name how inputs lie,
    as text (``[8@data, 16]``) or as :class:`Sharding`; the others are whole on every rank. ``outputs`` says the
    same by the output's number or the name of its node; the others, and all if it is None, are made whole, with
    no sum owed. ``sequence`` are axes over which activations whose sums are owed are cut along time.
    ``example_inputs`` give the shapes of whole inputs where the placeholders have no ``meta["val"]``.

    The result takes and gives local tensors, padded where a size does not divide, in the order and nesting of
    ``graph_module``. Every node has an :class:`Annotation` in ``meta["meshwright"]``, with its sharding where it stands
    for a value of the whole program. Tensors that ``graph_module`` keeps as attributes are kept whole.

    Raises MeshwrightError: E0304, E0315 to E0317 for shardings that do not fit, E0330 for unknown names, E0331 for
    inputs of unknown shape, E0332 for what is no graph of ATen ops, E0251 for random ops.
    """
    whole = mesh if isinstance(mesh, Mesh) else Mesh(tuple(mesh.items()))
    traced = retrace(graph_module, example_inputs)
    _check_axes("sequence", sequence, whole)
    placement = _placement(traced, whole, inputs, outputs or {})
    placed = propagate(traced.graph, whole, placement, sequence=frozenset(sequence), warn=_warn)
    verify_owed(placed, whole)
    local = verify_shapes(lower(placed, whole), whole)
    for own in passes:
        local.module = own(local.module)
        for node in local.module.graph.nodes:
            if node.op == "call_function":
                node.meta.pop("val", None)  # nothing is known of what a foreign pass has left behind
        verify_shapes(local, whole)
    return _restored(graph_module, traced, verify_shapes(bucket(local, whole), whole))


def _placement(
    traced: Retraced,
    mesh: Mesh,
    inputs: Mapping[str, str | Sharding],
    outputs: Mapping[str | int, str | Sharding],
) -> Placement:
    places = {v.name: n for v, n in traced.graph.placeholders().items() if v.kind == "batch"}
    for name in inputs:
        if name not in places:
            raise error("E0330", f"there is no placeholder '{name}'", action=suggestion(name, places))
    lying = {
        Value("batch", name): _sharding(f"the input '{name}'", text, annotation(places[name]).shape, mesh)
        for name, text in inputs.items()
    }
    made = list(traced.graph.outputs().items())
    wanted = {}
    for which, text in outputs.items():
        value, node = made[_number(which, traced.names)]
        what = f"the output '{which}'"
        if not isinstance(node, fx.Node):
            raise error("E0330", f"{what} is no tensor", action="leave it out")
        wanted[value] = _sharding(what, text, annotation(node).shape, mesh)
    return Placement(lying, wanted, may_owe=frozenset(v for v, s in wanted.items() if s.owed))


def _number(which: str | int, names: tuple[str, ...]) -> int:
    """The place of an output that is given by its number or by the name of its node."""
    if isinstance(which, int) and 0 <= which < len(names):
        return which
    if which not in names or not which:
        known = [n for n in names if n] or [str(i) for i in range(len(names))]
        raise error("E0330", f"there is no output '{which}'", action=suggestion(str(which), known))
    return names.index(str(which))


def _sharding(what: str, given: str | Sharding, shape: tuple[int, ...], mesh: Mesh) -> Sharding:
    if isinstance(given, str):
        try:
            given = parse_sharding(given)
        except ValueError as fault:
            raise error(
                "E0317",
                f"{what} has a malformed sharding: {fault}",
                action='write "[1024@tensor, 768]": sizes, each with the axes that cut it',
            ) from None
    if given.shape != tuple(shape):
        raise error(
            "E0304",
            f"{what} has shape {list(shape)}, but its sharding {given} is for shape {list(given.shape)}",
            action=f"write the sharding for shape {list(shape)}",
        )
    cutting = [a for _, _, segment in given.segments() for a in segment.axes]
    _check_axes(what, [*cutting, *sorted(given.owed)], mesh)
    return given


def _check_axes(what: str, axes: Iterable[str], mesh: Mesh) -> None:
    seen: set[str] = set()
    for axis in axes:
        if axis in seen:
            raise error("E0316", f"axis '{axis}' is named twice for {what}", action="name it in one place only")
        if axis not in mesh.names:
            message = f"axis '{axis}', which {what} is cut by, is not in the mesh ({mesh})"
            raise error("E0315", message, action=suggestion(axis, mesh.names))
        seen.add(axis)


def _restored(original: fx.GraphModule, traced: Retraced, local: LocalGraph) -> fx.GraphModule:
    """The local module with constants as attributes, and the inputs and the nesting of outputs of the original."""
    graph = local.module.graph
    made = fx.GraphModule(local.module, graph)
    places = dict(zip(local.signature.inputs, graph.find_nodes(op="placeholder"), strict=True))
    for value, node in places.items():
        if value.kind == "constant":
            made.register_buffer(value.name, traced.constants[value.name])
            with graph.inserting_before(node):
                kept = graph.get_attr(value.name)
            kept.meta = dict(node.meta)
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    tensors = {v.name: n for v, n in places.items() if v.kind == "batch"}
    for place in reversed(original.graph.find_nodes(op="placeholder")):
        # numbers are part of the program by now, but the caller goes on giving them
        node = tensors.get(place.name) or graph.placeholder(place.name)
        first = next(iter(graph.nodes))
        if first is not node:
            first.prepend(node)
    (output,) = graph.find_nodes(op="output")
    flat: Any = output.args[0]
    output.args = (pytree.tree_unflatten(list(flat), traced.structure),)
    graph.lint()
    made.recompile()
    return made


def _warn(text: str) -> None:
    warnings.warn(DiagnosticWarning(Diagnostic("W0301", text)), stacklevel=2)
