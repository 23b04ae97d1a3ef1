"""Which sizes of a step may be changed, and how its ops are written then.

Every op's rule says which dims of its operands and results are one. Sizes among the arguments of an op are written
anew by what is known of that op here; of any other op with such arguments the sizes stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from meshwright.compiler.equivalence.atoms import Atom, Dim, dim_of, fix, unify
from meshwright.compiler.equivalence.lookups import Lookup, lookup_of
from meshwright.compiler.equivalence.meaning import is_item
from meshwright.compiler.equivalence.rewrites import Rewrite, Size, arange, shifted, written_at
from meshwright.compiler.graph.calls import op_call, operand_nodes
from meshwright.compiler.graph.program import Graph, StepProgram, Value
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.arguments import normal_dim
from meshwright.compiler.rules.rule import OpCall, Rule

PLAIN = frozenset(
    "einsum mm bmm mv dot addmm baddbmm permute transpose t numpy_T mT movedim swapaxes unsqueeze squeeze sum "
    "amax amin mean _softmax _log_softmax _safe_softmax softmax log_softmax _softmax_backward_data "
    "_log_softmax_backward_data cumsum logsumexp any all prod argmax argmin var std var_mean linalg_vector_norm "
    "attention attention_backward cross_entropy cross_entropy_backward pick embedding dropout total "
    "sum_of_squares _to_copy clone contiguous alias detach zeros_like ones_like full_like empty_like cat stack "
    "tril triu copy fill zero sort flip lift_fresh_copy lift_fresh glu glu_backward native_batch_norm "
    "_native_batch_norm_legit _native_batch_norm_legit_functional native_batch_norm_backward scalar_tensor".split()
)
"""Ops whose arguments say nothing of sizes, and whose values do not depend on them."""
SHAPED = {
    **dict.fromkeys("view reshape _unsafe_view view_copy expand new_zeros new_ones new_full new_empty".split(), 1),
    **dict.fromkeys("zeros ones full empty".split(), 0),
}
"""Ops that are given the shape of their result, and where."""
WHOLE = frozenset(
    "index gather index_select scatter scatter_add index_add index_put topk histc count routed_mm routed_outer".split()
)
"""Ops by whose places, counts or bins the dims that they need entire keep their sizes; all others may change."""
NORMS = {
    **dict.fromkeys("native_layer_norm _fused_rms_norm rms_norm".split(), 1),
    **dict.fromkeys("native_layer_norm_backward _fused_rms_norm_backward rms_norm_backward".split(), 2),
}
"""Ops that are given the shape over which they normalise."""


@dataclass
class Sizes:
    """The atoms of a step."""

    dims: dict[fx.Node, Any] = field(default_factory=dict)
    """By node: the dims of its value, or those of each of its results."""
    values: dict[Value, list[Dim]] = field(default_factory=dict)
    rewrites: dict[fx.Node, Rewrite] = field(default_factory=dict)
    lookups: list[tuple[Lookup, Dim]] = field(default_factory=list)
    """Reads of a table by integers of the batch, with the dim that they count."""


def sizes_of(program: StepProgram, fixed: frozenset[str] = frozenset()) -> Sizes:
    """Read a step. ``fixed`` are names of nodes all of whose sizes stay."""
    found = Sizes()
    for graph in (program.prologue, program.micro, program.update):
        _read(graph, found, fixed)
    return found


def _read(graph: Graph, into: Sizes, fixed: frozenset[str]) -> None:
    roles = {node: value for value, node in graph.placeholders().items()}
    for node, value in roles.items():
        shape = tuple(int(n) for n in node.meta["val"].shape)
        into.dims[node] = into.values.setdefault(value, [dim_of(n) for n in shape])
        if value.kind == "key":
            for dim in into.dims[node]:
                fix(dim)
    for node in graph.module.graph.nodes:
        if node.op != "call_function":
            continue
        if is_item(node):
            into.dims[node] = into.dims[node.args[0]][node.args[1]]
            continue
        _call(node, into, roles)
        if node.name in fixed:
            _fix_all(node, into)
    for value, made in graph.outputs().items():
        if isinstance(made, fx.Node):
            # the new value of a weight has the shape of the old one
            for a, b in zip(into.values.setdefault(value, into.dims[made]), into.dims[made], strict=True):
                unify(a, b)


def _call(node: fx.Node, into: Sizes, roles: Mapping[fx.Node, Value]) -> None:
    call = op_call(node)
    rule = rule_of(call) if call is not None else None
    operands = operand_nodes(node) if call is not None else tuple(node.all_input_nodes)
    if call is None or rule is None:
        value = node.meta["val"]
        several = value if isinstance(value, (list, tuple)) else [value]
        fresh = [[dim_of(int(n)) for n in v.shape] for v in several]
        into.dims[node] = fresh if several is value else fresh[0]
        _fix_all(node, into)
        return
    factors = {f: [Atom(n)] for f, n in rule.sizes.items()}
    for operand, dims in zip(operands, rule.operands, strict=True):
        for given, fs in zip(into.dims[operand], dims, strict=True):
            unify([a for f in fs for a in factors[f]], given)
    made = [None if dims is None else [[a for f in fs for a in factors[f]] for fs in dims] for dims in rule.results]
    into.dims[node] = made if isinstance(node.meta["val"], (list, tuple)) else made[0]
    rewrite = _rewrite(node, call, rule, factors, into, roles)
    if rewrite is None:
        _fix_all(node, into)
    elif rewrite is not _same:
        into.rewrites[node] = rewrite


def _fix_all(node: fx.Node, into: Sizes) -> None:
    for other in (node, *node.all_input_nodes):
        dims, value = into.dims[other], other.meta["val"]
        for one in dims if isinstance(value, (list, tuple)) else [dims]:
            for dim in one or ():
                fix(dim)


def _same(args: list[Any], size: Size) -> list[Any]:
    return args


def _rewrite(
    node: fx.Node,
    call: OpCall,
    rule: Rule,
    factors: Mapping[str, Dim],
    into: Sizes,
    roles: Mapping[fx.Node, Value],
) -> Rewrite | None:
    """How the arguments are written for other sizes; None: the sizes of this op stay."""
    op = call.name.split(".")[1]
    made = into.dims[node]
    if op in SHAPED:
        return written_at(SHAPED[op], lambda size: [size(d) for d in made])
    if op in NORMS:
        operand = into.dims[operand_nodes(node)[0 if NORMS[op] == 1 else 1]]
        count = len(call.args[NORMS[op]])
        return written_at(NORMS[op], lambda size: [size(d) for d in operand[len(operand) - count :]])
    if (found := lookup_of(node, call, roles)) is not None:
        table = factors["v"]
        if found.batch is None:
            fix(table)
        else:
            into.lookups.append((found, table))
    if op == "embedding_backward":
        return written_at(2, lambda size: size(factors["v"]))
    if op == "arange":
        return arange(call, made)
    if op == "select_backward":
        shape = call.args[1]
        fix(factors.get(f"d{normal_dim(call.args[2], len(shape))}", []))
        return written_at(1, lambda size: [size(d) for d in made])
    if op in ("slice", "slice_backward", "slice_scatter", "constant_pad_nd", "split", "split_with_sizes"):
        return shifted(op, call, factors, made)
    if op == "select" or op == "unbind":
        fix(factors.get(f"d{normal_dim(call.args[1], len(call.operands[0].shape))}", []))
        return _same if op == "select" else None
    if op in WHOLE:
        for factor in rule.whole:
            fix(factors[factor])
        return _same
    return _same if op in PLAIN or call.pointwise or (op.endswith("_backward") and call.pointwise) else None
