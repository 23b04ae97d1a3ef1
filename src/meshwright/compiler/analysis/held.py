"""What a rank holds between the graphs of a step: parameters and state, gradient accumulators, gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from meshwright.compiler.analysis.kinds import INPUT_KINDS
from meshwright.compiler.analysis.lifetimes import roles
from meshwright.compiler.analysis.offloading import stores
from meshwright.compiler.analysis.storage import Storage, Storages, tensor_bytes
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.mesh import MICRO
from meshwright.compiler.summary import Buffer

_HELD = ("parameter", "state", "buffer", "constant")
_REDUCE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def copies_of(name: str, repeats: Mapping[str, int]) -> int:
    """How many equal ones a parameter or state tensor stands for, by the block that its name begins with."""
    block = max((b for b in repeats if b and name.startswith(b + ".")), key=len, default="")
    return repeats[block] if block else 1


def held_values(rank_program: RankProgram) -> dict[Value, int]:
    """What a rank holds throughout, in bytes; each tensor once, however many graphs read it."""
    seen: dict[Value, int] = {}
    away = stores(rank_program.update)
    for graph in (rank_program.prologue, rank_program.micro, rank_program.update):
        for node, value in roles(graph)[0].items():
            if value.kind in _HELD and MICRO not in graph.inputs[value].axes and node not in away:
                seen[value] = max(seen.get(value, 0), sum(tensor_bytes(node)))
    return seen


def held_bytes(rank_program: RankProgram, repeats: Mapping[str, int]) -> dict[str, int]:
    """What a rank holds throughout, by kind, of all repeats."""
    held: Counter[str] = Counter()
    for value, size in held_values(rank_program).items():
        held[INPUT_KINDS[value.kind]] += size * copies_of(value.name, repeats)
    return dict(held)


def accumulators(rank_program: RankProgram) -> dict[str, int]:
    """By parameter, the bytes of its gradient's accumulator, in the dtype of reduction or a wider one."""
    least = _REDUCE[rank_program.plan.accumulate]
    found = {}
    for value, node in roles(rank_program.micro)[1].items():
        note = annotation(node)
        if value.kind == "gradient" and note.dtype is not None:
            found[value.name] = math.prod(note.shape) * max(least, note.dtype.itemsize)
    return found


def accumulator_bytes(rank_program: RankProgram, repeats: Mapping[str, int]) -> int:
    """The bytes of all gradient accumulators."""
    return sum(size * copies_of(name, repeats) for name, size in accumulators(rank_program).items())


def released_together(rank_program: RankProgram, memory: Storages, buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
    """The buffers of an update, where gradients that micro made in one piece of memory (one message brought them) are
    released with the last one of them."""
    plan = rank_program.plan
    _, made = roles(rank_program.micro)
    least = _REDUCE[plan.accumulate] if plan.microbatches > 1 else 0
    pieces: dict[str, frozenset[Storage]] = {}
    for node, value in roles(rank_program.update)[0].items():
        source = made.get(value) if value.kind == "gradient" else None
        kept = annotation(source).dtype == annotation(node).dtype if source is not None else False
        # a sum that is taken in a wider dtype has memory of its own
        if source is not None and kept and (annotation(source).dtype or torch.float64).itemsize >= least:
            pieces[node.name] = frozenset(memory.owned.get(source, ()))
    last: dict[frozenset[Storage], int] = {}
    for buffer in buffers:
        if buffer.born < 0 and buffer.name in pieces:
            last[pieces[buffer.name]] = max(last.get(pieces[buffer.name], 0), buffer.last)
    return tuple(replace(b, last=last[pieces[b.name]]) if b.born < 0 and b.name in pieces else b for b in buffers)
