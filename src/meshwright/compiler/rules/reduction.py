"""Reductions over dims: sum, max, min, logsumexp can be owed; the others need the dim whole."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.compiler.rules.arguments import normal_dim, normal_dims
from meshwright.compiler.rules.dims import is_float, named
from meshwright.compiler.rules.rule import Dims, Factors, OpCall, Rule, rule


def reduced(dims: Dims, over: Iterable[int], keep: bool) -> Dims:
    """The dims of a result in which some dims are reduced."""
    gone = set(over)
    found: list[Factors] = []
    for i, factors in enumerate(dims):
        if i not in gone:
            found.append(factors)
        elif keep:
            found.append(())
    return tuple(found)


def reduction(
    call: OpCall,
    over: Iterable[int],
    keep: bool,
    by: str | None = None,
    linear: bool = False,
    accumulates: bool = False,
) -> Rule:
    """``by`` is the reduction that a cut leaves owed; None: the dims are whole."""
    over = tuple(over)
    sizes: dict[str, int] = {}
    operand = named(call.operands[0].shape, "d", sizes)
    factors = [f for d in over for f in operand[d]]
    result = reduced(operand, over, keep)
    return Rule(
        sizes,
        (operand,),
        tuple(result if r is not None else None for r in call.results),
        reduce=dict.fromkeys(factors, by) if by else {},
        whole=frozenset() if by else frozenset(factors),
        linear=(frozenset({0}),) if linear else (),
        relations=dict.fromkeys(factors, "all"),
        accumulates=frozenset(factors) if accumulates else frozenset(),
    )


def _dims(call: OpCall, at: int = 1) -> tuple[int, ...]:
    return normal_dims(call.args[at] if len(call.args) > at else None, len(call.operands[0].shape))


def _keep(call: OpCall, at: int = 2) -> bool:
    return bool(call.args[at]) if len(call.args) > at else False


@rule("aten.sum")
def sum_(call: OpCall) -> Rule:
    return reduction(call, _dims(call), _keep(call), "sum", linear=_keeps_dtype(call), accumulates=True)


def _keeps_dtype(call: OpCall) -> bool:
    """A sum of booleans counts, and a sum of integers as floats rounds: an owed part cannot pass."""
    source, result = call.operands[0].dtype, call.results[0].dtype if call.results[0] else ""
    return source == result or (is_float(source) and is_float(result))


@rule("aten.mean")
def mean(call: OpCall) -> Rule:
    """Whole, for its divisor is the size: capture turns a mean into a sum and a constant."""
    return reduction(call, _dims(call), _keep(call), linear=True, accumulates=True)


@rule("aten.amax", "aten.amin")
def extreme(call: OpCall) -> Rule:
    by = "max" if call.name.startswith("aten.amax") else "min"
    # only floats have an infinity to fill padding with
    floats = is_float(call.operands[0].dtype)
    return reduction(call, _dims(call), _keep(call), by if floats else None)


@rule("aten.max", "aten.min")
def extreme_and_place(call: OpCall) -> Rule:
    """``max(x)`` is a reduction; ``max(x, dim)`` also says where, which needs the dim whole."""
    overload = call.name.rpartition(".")[2]
    if overload == "default":
        return extreme_of_all(call)
    if overload == "other":
        from meshwright.compiler.rules.pointwise import pointwise

        return pointwise(call)
    return reduction(call, _dims(call), _keep(call))


def extreme_of_all(call: OpCall) -> Rule:
    by = "max" if call.name.startswith("aten.max") else "min"
    floats = is_float(call.operands[0].dtype)
    return reduction(call, range(len(call.operands[0].shape)), False, by if floats else None)


@rule("aten.logsumexp")
def logsumexp(call: OpCall) -> Rule:
    return reduction(call, _dims(call), _keep(call), "logsumexp", accumulates=True)


@rule("aten.any", "aten.all", "aten.prod", "aten.argmax", "aten.argmin", "aten.median", "aten.mode", "aten.kthvalue")
def entire(call: OpCall) -> Rule:
    at = 2 if "kthvalue" in call.name else 1
    return reduction(call, _dims(call, at), _keep(call, at + 1))


@rule("aten.var", "aten.std", "aten.var_mean")
def variance(call: OpCall) -> Rule:
    keep = bool(call.kwargs.get("keepdim", False))
    if call.name.endswith((".dim", ".default")):
        keep = _keep(call, 3)
    over = _dims(call) if not call.name.endswith(".default") else tuple(range(len(call.operands[0].shape)))
    return reduction(call, over, keep)


@rule("aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim")
def norm(call: OpCall) -> Rule:
    return reduction(call, _dims(call, 2), _keep(call, 3), accumulates=True)


@rule("aten.cumsum", "aten.cumprod", "aten.logcumsumexp", "aten.cummax", "aten.cummin", "aten.sort", "aten.topk")
def along(call: OpCall) -> Rule:
    """The result has the dim too (``topk``: with another size), and needs all of it or all before."""
    shape = call.operands[0].shape
    at = {"aten.topk.default": 2, "aten.sort.stable": 2}.get(call.name, 1)
    dim = normal_dim(call.args[at] if len(call.args) > at else -1, max(len(shape), 1))
    if call.name == "aten.sort.stable":
        dim = normal_dim(call.kwargs.get("dim", -1), max(len(shape), 1))
    sizes: dict[str, int] = {}
    operand = named(shape, "d", sizes)
    op = call.name.split(".")[1]
    result, name, whole = operand, f"d{dim}", {f"d{dim}"} & set(sizes)
    if op == "topk":
        count = int(call.args[1])
        top: Factors = () if count == 1 else (f"{name}'",)
        sizes.update(dict.fromkeys(top, count))
        whole |= set(top)
        result = (*operand[:dim], top, *operand[dim + 1 :])
    return Rule(
        sizes,
        (operand,),
        (result,) * len(call.results),
        whole=frozenset(whole),
        linear=(frozenset({0}),) if op == "cumsum" and _keeps_dtype(call) else (),
        relations={name: "all" if op in ("sort", "topk") else "prefix"} if name in sizes else {},
    )
