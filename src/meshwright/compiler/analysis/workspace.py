"""What an op takes of memory while it runs, besides its operands and results, and gives back at its end.

Read off how each op is written: copies of operands that do not lie as its kernel wants them, casts to a wider dtype,
values of the size of its operands on the way. Work space inside kernels of torch that does not grow with the
tensors is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from meshwright.compiler.analysis.strides import as_view
from meshwright.compiler.graph.adapter import OpOverload, overload_name
from meshwright.compiler.graph.ops.contraction import kernel_form, parse
from meshwright.compiler.graph.ops.pieces import largest

_HALF = (2,)
"""Bytes of an element of the dtypes whose sums are taken in float32."""


def workspace(node: fx.Node) -> int:
    """The most that the op of a node takes beside what it reads and returns, in bytes."""
    if not isinstance(node.target, OpOverload):
        return 0
    function = _BY_OP.get(overload_name(node.target).rpartition(".")[0])
    if function is None:
        return 0
    given: list[Any] = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in node.args]
    result = node.meta.get("val")
    made = sum(_bytes(v) for v in (result if isinstance(result, (list, tuple)) else (result,)))
    return max(0, int(function(given, node.args, made)))


def _bytes(value: Any) -> int:
    return int(value.numel()) * value.element_size() if isinstance(value, Tensor) else 0


def _wide(x: Tensor) -> int:
    """Bytes of the tensor in the dtype in which it is accumulated."""
    return int(x.numel()) * max(4, x.element_size())


def _cast(x: Tensor) -> int:
    """Bytes of the cast to that dtype; 0 if it has it."""
    return _wide(x) if x.element_size() in _HALF else 0


def _logsumexp(given: Sequence[Any], _: Sequence[Any], made: int) -> int:
    return _piece(given[0], _cast(given[0]) + _wide(given[0]))


def _piece(x: Tensor, taken: int) -> int:
    """Of what is taken for all of the logits, the part that is taken for the largest piece of them."""
    return taken * largest(x.shape, 1) // max(1, int(x.numel()))


def _pick(given: Sequence[Any], _: Sequence[Any], made: int) -> int:
    return 3 * int(given[1].numel())


def _cross_entropy(given: Sequence[Any], _: Sequence[Any], made: int) -> int:
    return _logsumexp(given, _, made)


def _cross_entropy_backward(given: Sequence[Any], _: Sequence[Any], made: int) -> int:
    logits, target = given[1], given[2]
    on_the_way = _cast(logits) + _wide(logits)
    return _piece(logits, on_the_way + int(target.numel()) * (3 + max(4, int(logits.element_size()))))


def _embedding_backward(given: Sequence[Any], nodes: Sequence[Any], made: int) -> int:
    grad, rows = given[0], int(given[2])
    shard = isinstance(nodes[3], fx.Node) or nodes[3] != 0 or nodes[4] >= 0
    taken = _bytes(grad) if shard else 0
    taken += 0 if shard or _flat(grad, 1) else _bytes(grad)
    if grad.element_size() in _HALF:
        taken += _wide(grad) + rows * int(grad.shape[-1]) * 4 - made
    return taken


def _dropout(given: Sequence[Any], _: Sequence[Any], made: int) -> int:
    """Two int64 for each element of a piece: its random number, and that number shifted."""
    return 16 * largest(given[0].shape, max(0, given[0].dim() - 1))


def _sum_of_squares(given: Sequence[Any], _: Sequence[Any], made: int) -> int:
    return 0 if _flat(given[0], 0) else _bytes(given[0])


def _flat(x: Tensor, kept: int) -> bool:
    """Whether all dims but the last ``kept`` are one run of memory."""
    tail = list(x.shape[x.dim() - kept :])
    return as_view(x.shape, x.stride(), [math.prod(x.shape[: x.dim() - kept]), *tail])


def _attention(given: Sequence[Any], _: Sequence[Any], made: int) -> int:
    query, key, value, _mask, seed, _causal, _window, _scale, dropout = given[:9]
    scores = int(math.prod(query.shape[:3])) * int(key.shape[2])
    wide = max(4, int(query.element_size()))
    if not _explicit(query, value, seed, dropout):
        return _unfit(query, key, value)
    # the products and the scaled ones; the scores, shifted ones and weights; with dropout the random numbers of all
    products = scores * int(query.element_size() + (wide if query.element_size() != wide else 0) + wide)
    if not dropout:
        return max(products, 3 * scores * wide) - made
    return max(products, 2 * scores * wide + 16 * scores, scores * (4 * wide)) - made


def _attention_backward(given: Sequence[Any], _: Sequence[Any], made: int) -> int:
    grad, query, key, value, _mask, seed, out, total, _causal, _window, _scale, dropout = given[:12]
    scores = int(math.prod(query.shape[:3])) * int(key.shape[2])
    wide = max(4, int(query.element_size()))
    if not _explicit(query, value, seed, dropout):
        return _unfit(grad, query, key, value, out) + _bytes(total)
    if not dropout:
        return 5 * scores * wide - made
    return max(2 * scores * wide + 16 * scores, 6 * scores * wide) - made


def explicit(node: fx.Node) -> bool:
    """Whether an attention computes its scores one by one, on every device."""
    given: list[Any] = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in node.args]
    first = 1 if "backward" in str(node.target) else 0
    query, value, seed = given[first], given[first + 2], given[first + 4]
    return _explicit(query, value, seed, given[11 if first else 8])


def _explicit(query: Any, value: Any, seed: Any, dropout: Any) -> bool:
    """Whether the scores are computed one by one: no fused kernel has our dropout, or values of another width."""
    return (dropout > 0 and seed is not None) or query.shape[-1] != value.shape[-1]


def _unfit(*tensors: Tensor) -> int:
    """Bytes of copies of what does not have stride 1 along its last dim."""
    return sum(_bytes(x) for x in tensors if x.stride(-1) != 1)


def _einsum(given: Sequence[Any], _: Sequence[Any], made: int) -> int:
    equation, x, y = given
    kind = kernel_form(equation)
    if kind in ("outer", "outer_swapped"):
        return sum(_bytes(t) for t in (x, y) if not _flat(t, 1))
    if kind == "linear" or (kind == "matmul" and y.dim() == 2):
        return 0 if _flat(x, 1) else _bytes(x)
    if kind == "matmul":
        return sum(_bytes(t) for t in (x, y) if not _flat(t, 2))
    return _general(equation, x, y, made)


def _general(equation: str, x: Tensor, y: Tensor, made: int) -> int:
    """A batched product: operands as ``[batch, m, k]`` and ``[batch, k, n]``, and its result in the wanted order."""
    a, b, out = parse(equation)
    batch = [t for t in out if t in a and t in b]
    summed = [t for t in a if t in b and t not in out]
    left, right = [t for t in out if t in a and t not in b], [t for t in out if t in b and t not in a]
    taken = sum(
        _bytes(t) if not _grouped(t, letters, groups) else 0
        for t, letters, groups in ((x, a, (batch, left, summed)), (y, b, (batch, summed, right)))
    )
    return taken + (made if "".join((*batch, *left, *right)) != out else 0)


def _grouped(x: Tensor, letters: str, groups: Sequence[Sequence[str]]) -> bool:
    """Whether the tensor, its dims in the order of the groups, can be seen with one dim for each group."""
    order = [letters.index(t) for group in groups for t in group]
    if len(order) != len(letters):
        return False
    shape = [int(x.shape[d]) for d in order]
    wanted = [math.prod([int(x.shape[letters.index(t)]) for t in group]) for group in groups]
    return as_view(shape, [x.stride(d) for d in order], wanted)


def _routed(given: Sequence[Any], _: Sequence[Any], made: int) -> int:
    """The rows in sorted order: those that come in, and of a product those that go out."""
    x, other, *rest = given
    order = 2 * int(rest[0].numel()) * 8
    return _bytes(x) + order + (made if other.dim() > x.dim() else _bytes(other))


_BY_OP: dict[str, Callable[[Sequence[Any], Sequence[Any], int], int]] = {
    "meshwright.logsumexp": _logsumexp,
    "meshwright.pick": _pick,
    "meshwright.cross_entropy": _cross_entropy,
    "meshwright.cross_entropy_backward": _cross_entropy_backward,
    "meshwright.embedding_backward": _embedding_backward,
    "meshwright.dropout": _dropout,
    "meshwright.sum_of_squares": _sum_of_squares,
    "meshwright.attention": _attention,
    "meshwright.attention_backward": _attention_backward,
    "meshwright.einsum": _einsum,
    "meshwright.routed_mm": _routed,
    "meshwright.routed_outer": _routed,
}
