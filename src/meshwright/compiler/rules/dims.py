"""Building blocks of rules: the dims of a tensor as factors, named after their position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.compiler.rules.rule import Dims, Factors, OpCall, Rule, TensorType


def named(shape: Sequence[int], prefix: str, sizes: dict[str, int]) -> Dims:
    """One factor ``<prefix><i>`` per dim; a dim of size 1 has none. The sizes are noted in ``sizes``."""
    dims: list[Factors] = []
    for i, size in enumerate(shape):
        if size == 1:
            dims.append(())
        else:
            sizes[f"{prefix}{i}"] = size
            dims.append((f"{prefix}{i}",))
    return tuple(dims)


def broadcast(operand: Sequence[int], result: Sequence[int], dims: Dims) -> Dims | None:
    """The dims of an operand that is broadcast to the result of the given dims; None if it is not."""
    missing = len(result) - len(operand)
    if missing < 0:
        return None
    found: list[Factors] = []
    for size, whole, factors in zip(operand, result[missing:], dims[missing:], strict=True):
        if size == whole:
            found.append(factors)
        elif size == 1:
            found.append(())
        else:
            return None
    return tuple(found)


def listed(dims: Iterable[Factors]) -> frozenset[str]:
    """All factors of some dims."""
    return frozenset(f for factors in dims for f in factors)


def all_whole(call: OpCall) -> Rule:
    """The rule of an op of which nothing is known: every dim of every tensor is entire."""
    sizes: dict[str, int] = {}

    def dims(tensor: TensorType, prefix: str) -> Dims:
        return named(tensor.shape, prefix, sizes)

    operands = tuple(dims(t, f"x{n}_") for n, t in enumerate(call.operands))
    results = tuple(dims(t, f"y{n}_") if t is not None else None for n, t in enumerate(call.results))
    relations = {f: "all" for operand in operands for f in listed(operand)}
    return Rule(sizes, operands, results, whole=frozenset(sizes), relations=relations)


def is_float(dtype: str) -> bool:
    """Whether the short name is that of a floating point dtype."""
    return dtype.startswith(("f", "bf"))
