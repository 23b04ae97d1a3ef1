"""Reads and writes at places that data decides: the indexed dims are whole, the others pass."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.compiler.rules.arguments import normal_dim, operand_at, with_arguments
from meshwright.compiler.rules.dims import all_whole, broadcast, named
from meshwright.compiler.rules.rule import Dims, LocalCall, OpCall, Rule, Shards, TensorType, rule

_FIRST = (frozenset({0}),)


def _advanced(
    shape: Sequence[int], indices: Sequence[TensorType | None]
) -> tuple[dict[str, int], Dims, list[Dims], Dims, frozenset[str]] | None:
    """Sizes, the dims of the tensor, of each index, of what is read, and the factors of the indexed dims."""
    given = [d for d, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if not given or any(t.dtype in ("bool", "u8") for t in tensors):
        return None  # a mask: how much is read depends on data
    rank = max(len(t.shape) for t in tensors)
    shapes = [(1,) * (rank - len(t.shape)) + t.shape for t in tensors]
    joint = tuple(max(column) for column in zip(*shapes, strict=True)) if rank else ()
    sizes: dict[str, int] = {}
    dims = named(shape, "d", sizes)
    places = named(joint, "i", sizes)
    aligned = [broadcast(t.shape, joint, places) for t in tensors]
    if any(a is None for a in aligned):
        return None
    together = given == list(range(given[0], given[-1] + 1))
    rest = [d for d in range(len(shape)) if d not in given]
    front = sum(d < given[0] for d in rest) if together else 0
    read = (*(dims[d] for d in rest[:front]), *places, *(dims[d] for d in rest[front:]))
    whole = frozenset(f for d in given for f in dims[d])
    return sizes, dims, [a for a in aligned if a is not None], read, whole


@rule("aten.index", "aten._unsafe_index")
def index(call: OpCall) -> Rule:
    """``x[i, :, j]``: the places of the index tensors pass, so do the dims that are not indexed."""
    found = _advanced(call.operands[0].shape, call.args[1])
    if found is None:
        return all_whole(call)
    sizes, dims, places, read, whole = found
    relations = dict.fromkeys(whole, "data")
    return Rule(sizes, (dims, *places), (read,), whole=whole, linear=_FIRST, relations=relations)


@rule("aten.index_put", "aten._unsafe_index_put")
def index_put(call: OpCall) -> Rule:
    """``(x, indices, values, accumulate)``. Places that repeat may be written twice, so they are whole."""
    found = _advanced(call.operands[0].shape, call.args[1])
    if found is None:
        return all_whole(call)
    sizes, dims, places, read, whole = found
    values = broadcast(call.operands[-1].shape, _shape(read, sizes), read)
    if values is None:
        return all_whole(call)
    whole |= {f for f in sizes if f.startswith("i")}
    last = len(call.operands) - 1
    return Rule(
        sizes,
        (dims, *places, values),
        (dims,),
        whole=whole,
        linear=(frozenset({0, last}),) if call.args[3] else (),
        relations=dict.fromkeys(whole, "data"),
    )


def _shape(dims: Dims, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(sizes[factors[0]] if factors else 1 for factors in dims)


@rule("aten.index_select")
def index_select(call: OpCall) -> Rule:
    shape, places = call.operands[0].shape, call.operands[1].shape
    if len(places) != 1 or not shape:
        return all_whole(call)
    dim = normal_dim(call.args[1], len(shape))
    sizes: dict[str, int] = {}
    dims = named(shape, "d", sizes)
    place = named(places, "i", sizes)
    whole = frozenset(dims[dim])
    return Rule(
        sizes,
        (dims, place),
        ((*dims[:dim], *place, *dims[dim + 1 :]),),
        whole=whole,
        linear=_FIRST,
        relations=dict.fromkeys(whole, "data"),
    )


@rule("aten.index_add")
def index_add(call: OpCall) -> Rule:
    """``(x, dim, index, source)``: ``x`` is added once, so the places are whole."""
    shape, source = call.operands[0].shape, call.operands[2].shape
    if len(shape) != len(source):
        return all_whole(call)
    dim = normal_dim(call.args[1], len(shape))
    sizes: dict[str, int] = {}
    dims = named(shape, "d", sizes)
    place = named((source[dim],), "i", sizes)
    whole = frozenset(dims[dim]) | frozenset(place[0])
    return Rule(
        sizes,
        (dims, place, (*dims[:dim], *place, *dims[dim + 1 :])),
        (dims,),
        whole=whole,
        linear=(frozenset({0, 2}),),
        relations=dict.fromkeys(whole, "data"),
    )


def _batched(call: OpCall, index: int) -> tuple[dict[str, int], Dims, Dims, int] | None:
    """Sizes and dims of tensor and index of gather and scatter; None where a dim is only partly indexed."""
    shape, places = call.operands[0].shape, call.operands[index].shape
    dim = normal_dim(call.args[1], max(len(shape), 1))
    if not shape or len(shape) != len(places):
        return None
    if any(a != b for d, (a, b) in enumerate(zip(shape, places, strict=True)) if d != dim):
        return None
    sizes: dict[str, int] = {}
    dims = named(shape, "d", sizes)
    place = named((places[dim],), "i", sizes)
    return sizes, dims, (*dims[:dim], *place, *dims[dim + 1 :]), dim


@rule("aten.gather")
def gather(call: OpCall) -> Rule:
    """``(x, dim, index)``: all dims but ``dim`` are those of the index, whose places pass."""
    found = _batched(call, 1)
    if found is None:
        return all_whole(call)
    sizes, dims, places, dim = found
    whole = frozenset(dims[dim])
    relations = dict.fromkeys(whole, "data")
    return Rule(sizes, (dims, places), (places,), whole=whole, linear=_FIRST, relations=relations)


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(call: OpCall) -> Rule:
    """``(x, dim, index, source)``: batch-like dims pass; the scattered dim and its places are whole."""
    found = _batched(call, 1)
    source = operand_at(call, 3)
    if found is None or (source is not None and call.operands[2].shape != call.operands[1].shape):
        return all_whole(call)
    sizes, dims, places, dim = found
    whole = frozenset(dims[dim]) | frozenset(places[dim])
    operands = (dims, places, places) if source is not None else (dims, places)
    adds = call.name.startswith("aten.scatter_add")
    return Rule(
        sizes,
        operands,
        (dims,),
        whole=whole,
        linear=(frozenset({0, 2}),) if adds else (),
        relations=dict.fromkeys(whole, "data"),
    )


@rule("aten.one_hot")
def one_hot(call: OpCall) -> Rule:
    result = call.results[0]
    if result is None:
        return all_whole(call)
    sizes: dict[str, int] = {}
    dims = named(result.shape, "d", sizes)
    whole = frozenset(dims[-1])

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        return with_arguments(unchanged, {1: result.shape[-1]})

    return Rule(sizes, (dims[:-1],), (dims,), whole=whole, local=local)


@rule("aten.bucketize.Tensor")
def bucketize(call: OpCall) -> Rule:
    """The places of each element of ``x`` among the borders, which are whole."""
    sizes: dict[str, int] = {}
    dims = named(call.operands[0].shape, "d", sizes)
    borders = named(call.operands[1].shape, "b", sizes)
    whole = frozenset(borders[0])
    return Rule(sizes, (dims, borders), (dims,), whole=whole, relations=dict.fromkeys(whole, "all"))
