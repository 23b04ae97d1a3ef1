"""Reads off a folded step what the search must know of a program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import fx

from meshwright.compiler.analysis.blocks import Folded, region_of
from meshwright.compiler.analysis.kernels import flops
from meshwright.compiler.analysis.summarize import model_flops
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.graph.program import StepProgram, TensorSpec, annotation
from meshwright.compiler.passes.tensor_parallel import cut_sizes
from meshwright.compiler.plan import Precision
from meshwright.compiler.search.facts import ProgramFacts

_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def program_facts(folded: Folded, precision: Precision) -> ProgramFacts:
    """The facts of the whole step that was folded."""
    program = folded.program
    parameters = folded.parameters()
    sizes = cut_sizes(program)
    heads = sizes.get("heads", ())
    trained = [p.spec for p in parameters if p.trainable]
    kept = repeated_blocks(labels(program))
    dtype = _dtype(program)
    compute = dtype.itemsize
    integers = [math.prod(s.shape) for s in program.batch.values() if not s.dtype.is_floating_point]
    cuts: dict[str, int] = {name: min(sizes[name]) for name in ("inner", "vocabulary") if name in sizes}
    if heads:
        cuts["heads"] = math.prod(heads)
    return ProgramFacts(
        batch=program.batch_size,
        tokens=max(integers, default=0),
        parameters=sum(_elements(p.spec) for p in parameters),
        weights=sum(_bytes(p.spec) for p in parameters),
        gradients=sum(_elements(s) * max(_BYTES[precision.reduce] if _mixed(precision) else s.dtype.itemsize, compute)
                      for s in trained),
        state=sum(_bytes(s) for s in folded.state().values()),
        compute_weights=sum(_elements(p.spec) * min(compute, p.spec.dtype.itemsize) for p in parameters),
        flops=model_flops(program, folded.repeats),
        dtype=short_name(dtype),
        blocks={pattern: len(names) for pattern, names in repeated_blocks(folded.blocks()).items()},
        stream=_stream(program, kept) // program.batch_size,
        logits=_outside(program, kept) // program.batch_size,
        kernels=sum(folded.repeats.get(annotation(n).block, 1) for n in _calls(program)),
        heads=cuts.get("heads", 0),
        key_value_heads=heads[0] if heads and heads[0] > 1 else cuts.get("heads", 0),
        cuts=cuts,
    )  # fmt: skip


def labels(program: StepProgram) -> list[str]:
    """The blocks that the nodes of a step are labelled with."""
    return list(dict.fromkeys(annotation(n).block for n in program.micro.module.graph.nodes))


def repeated_blocks(labels: Iterable[str]) -> dict[str, list[str]]:
    """The outermost repeated ones of a step's blocks, in order, by the pattern of their container
    (``model.layers.*``)."""
    found: dict[str, list[str]] = {}
    for label in labels:
        block = region_of(label, 1)
        container, _, number = block.rpartition(".")
        if number.isdecimal():
            names = found.setdefault(f"{container}.*" if container else "*", [])
            if block not in names:
                names.append(block)
    return {
        pattern: sorted(names, key=lambda name: int(name.rpartition(".")[2]))
        for pattern, names in found.items()
        if len(names) > 1
    }


def _mixed(precision: Precision) -> bool:
    return precision != Precision()


def _elements(spec: TensorSpec) -> int:
    return math.prod(spec.shape)


def _bytes(spec: TensorSpec) -> int:
    return _elements(spec) * spec.dtype.itemsize


def _calls(program: StepProgram) -> Iterator[fx.Node]:
    return (n for n in program.micro.module.graph.nodes if n.op == "call_function")


def _dtype(program: StepProgram) -> torch.dtype:
    """The dtype in which most floating point operations are done."""
    work: Counter[torch.dtype] = Counter()
    for node in _calls(program):
        dtype = annotation(node).dtype
        if dtype is not None and dtype.is_floating_point and isinstance(node.target, torch._ops.OpOverload):
            work[dtype] += int(flops(node))
    return work.most_common(1)[0][0] if work else torch.float32


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return int(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


def _stream(program: StepProgram, blocks: Mapping[str, list[str]]) -> int:
    """Bytes of the largest value that one block makes in forward and the next one reads."""
    following = {one: other for names in blocks.values() for one, other in pairwise(names)}
    found = 0
    for node in _calls(program):
        then = following.get(region_of(annotation(node).block, 1))
        if then is None or annotation(node).phase != "forward":
            continue
        if any(region_of(annotation(u).block, 1) == then for u in node.users):
            found = max(found, _size(node))
    return found


def _outside(program: StepProgram, blocks: Mapping[str, list[str]]) -> int:
    """Bytes of the largest value that forward makes outside the repeated blocks."""
    inside = {name for names in blocks.values() for name in names}
    return max(
        (
            _size(node)
            for node in _calls(program)
            if annotation(node).phase == "forward" and region_of(annotation(node).block, 1) not in inside
        ),
        default=0,
    )
