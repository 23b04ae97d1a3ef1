"""Convolutions: batch, groups and output channels pass, input channels are summed.

The spatial dims are whole, except where the kernel tiles the input (patch embeddings): there the
tiles pass. A bias is added once, so with one the input channels are whole.
"""

from __future__ import annotations

import math
from typing import Any

from meshwright.compiler.rules.arguments import operand_at, with_arguments
from meshwright.compiler.rules.dims import all_whole
from meshwright.compiler.rules.rule import Dims, Factors, LocalCall, OpCall, Rule, Shards, rule


class _Form:
    """The factors of input, weight, bias and output, from the arguments of either op."""

    def __init__(self, image: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], args: tuple[Any, ...]):
        stride, padding, dilation, transposed, _, groups = args
        self.sizes: dict[str, int] = {"n": image[0], "o": out[1] // groups, "i": image[1] // groups}
        group: Factors = ("g",) if groups > 1 else ()
        self.sizes.update({"g": groups} if groups > 1 else {})
        self.spatial: set[str] = set()
        self.relations = {"i": "all"}
        self.aligned: dict[str, str] = {}
        ins: list[Factors] = []
        kernels: list[Factors] = []
        outs: list[Factors] = []
        for d in range(len(image) - 2):
            size, kernel, result = image[d + 2], weight[d + 2], out[d + 2]
            step, pad, spread = (a[d] if len(a) > d else a[0] for a in (stride, padding, dilation))
            tiles = kernel == step and pad == 0 and spread == 1 and size == result * kernel and not transposed
            self.sizes.update({f"k{d}": kernel, f"s{d}": result})
            self.spatial.add(f"k{d}")
            self.relations[f"k{d}"] = "all"
            kernels.append((f"k{d}",))
            outs.append((f"s{d}",))
            if tiles:
                ins.append((f"s{d}", f"k{d}"))
            else:
                self.sizes[f"x{d}"] = size
                self.spatial |= {f"x{d}", f"s{d}"}
                near = step == 1 and not transposed  # of other strides no interval holds for all positions
                self.relations[f"x{d}"] = f"[{-pad},{(kernel - 1) * spread - pad}]" if near else "all"
                self.aligned.update({f"x{d}": f"s{d}"} if near else {})
                ins.append((f"x{d}",))
        self.input: Dims = (("n",), (*group, "i"), *ins)
        self.output: Dims = (("n",), (*group, "o"), *outs)
        self.bias: Dims = ((*group, "o"),)
        self.weight: Dims = ((*group, "i"), ("o",), *kernels) if transposed else ((*group, "o"), ("i",), *kernels)

    @property
    def flops(self) -> float:
        """Two per product: each output element (transposed: input element) meets ``i * kernel`` weights."""
        kernel = math.prod(size for f, size in self.sizes.items() if f.startswith("k"))
        places = math.prod(size for f, size in self.sizes.items() if f.startswith("s"))
        return 2.0 * self.sizes["n"] * self.sizes["o"] * self.sizes["i"] * self.sizes.get("g", 1) * kernel * places


@rule("aten.convolution")
def convolution(call: OpCall) -> Rule:
    out = call.results[0]
    if out is None or len(call.operands[0].shape) != len(call.operands[1].shape):
        return all_whole(call)
    form = _Form(call.operands[0].shape, call.operands[1].shape, out.shape, call.args[3:9])
    bias = operand_at(call, 2) is not None

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        return with_arguments(unchanged, {8: shards.sizes.get("g", 1)})

    return Rule(
        form.sizes,
        (form.input, form.weight, *([form.bias] if bias else [])),
        (form.output,),
        reduce={} if bias else {"i": "sum"},
        whole=frozenset(form.spatial | ({"i"} if bias else set())),
        linear=(frozenset({0, 2}), frozenset({1, 2})) if bias else (frozenset({0}), frozenset({1})),
        relations=form.relations,
        aligned=form.aligned,
        local=local,
        flops=form.flops,
        accumulates=frozenset({"i"} | {f for f in form.spatial if f.startswith("k")}),
    )


@rule("aten.convolution_backward")
def backward(call: OpCall) -> Rule:
    """``(grad, input, weight, ...) -> (dinput, dweight, dbias)``, each with the factors of its own."""
    grad, image, weight = (t.shape for t in call.operands[:3])
    form = _Form(image, weight, grad, call.args[4:10])
    mask = call.args[10]
    results = tuple(
        dims if wanted else None for dims, wanted in zip((form.input, form.weight, form.bias), mask, strict=True)
    )
    tiles = {f for f in form.sizes if f.startswith("s")} - form.spatial

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        changes: dict[int, Any] = {9: shards.sizes.get("g", 1)}
        if call.args[3] is not None:
            changes[3] = [shards.sizes["o"] * shards.sizes.get("g", 1)]
        return with_arguments(unchanged, changes)

    return Rule(
        form.sizes,
        (form.output, form.input, form.weight),
        results,
        reduce={"n": "sum", "o": "sum", **dict.fromkeys(sorted(tiles), "sum")},
        whole=frozenset(form.spatial),
        linear=(frozenset({0}),),
        relations=dict.fromkeys({*form.spatial, *(("n", *tiles) if results[0] is None else ())}, "all"),
        local=local,
        flops=form.flops * sum(bool(wanted) for wanted in mask[:2]),
        accumulates=frozenset({"n", "o"} | tiles),
    )
