"""Ops of one kernel that torch does not write in other ones: here they are, or what they join."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call, tensors_in
from meshwright.compiler.causality.registry import replacement, rule
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.words import any_over

_EACH = "add sub mul div neg exp sqrt abs sigmoid pow maximum minimum clamp_min clamp_max addcmul addcdiv lerp".split()


@replacement(*(f"aten._foreach_{name}" for name in _EACH))
def each(call: Call) -> Any:
    """Tensor by tensor."""
    packet = getattr(torch.ops.aten, call.name.split(".")[1].removeprefix("_foreach_"))
    count = len(call["self"])
    made = []
    by_name = {a.name for a in call.func._schema.arguments if a.kwarg_only}
    with call.interpreter:
        for i in range(count):
            operands, keywords = [], {}
            for name, value in call.arguments.items():
                one = value[i] if isinstance(value, list | tuple) and len(value) == count else value
                if name in by_name:
                    keywords[name] = one
                else:
                    operands.append(one)
            made.append(packet(*operands, **keywords))
    return made, [call.interpreter.memory.read(one) for one in made]


@replacement("aten._trilinear")
def trilinear(call: Call) -> Any:
    """A product of three, each with dims of size 1 put in, summed over dims."""
    with call.interpreter:
        product: Tensor | None = None
        for number in (1, 2, 3):
            value = call[f"i{number}"]
            for dim in sorted(call[f"expand{number}"]):
                value = value.unsqueeze(dim)
            product = value if product is None else product * value
        assert product is not None
        made = product.sum(call["sumdim"])
    return made, call.interpreter.memory.read(made)


@replacement("aten.put")
def put_flat(call: Call) -> Any:
    """Writes at numbers of elements."""
    value = call["self"]
    with call.interpreter:
        flat = value.reshape(-1)
        index, source = call["index"].reshape(-1), call["source"].reshape(-1)
        made = flat.index_put((index,), source, accumulate=call["accumulate"]).reshape(value.shape)
    return made, call.interpreter.memory.read(made)


@replacement("aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(call: Call) -> Any:
    """Each bag joins the rows that its indices name; where bags begin must be known."""
    offsets = call.settled(call["offsets"])
    if not bool(offsets.known.all()):
        return NotImplemented
    out = call.func(*call.args, **call.kwargs)
    shadow = call.settled(call["indices"])
    ends = [*call["offsets"].tolist()[1:], call["indices"].numel()]
    bags = out[0].shape[0]
    rows = torch.zeros((bags, call.width), dtype=torch.int64)
    for bag, start in enumerate(call["offsets"].tolist()[:bags]):
        if shadow.deps is not None:
            rows[bag] = any_over(shadow.deps[start : ends[bag]], (0,))
    weights = call.get("per_sample_weights")
    if weights is not None and call.settled(weights).deps is not None:
        return NotImplemented
    made = [Shadow(constant(out[0].shape, False).known, rows.unsqueeze(1).expand(*out[0].shape, call.width))]
    return out, [*made, *(constant(o.shape, False) for o in tensors_in(out)[1:])]


@rule("aten._cdist_forward", "aten._euclidean_dist")
def distances(call: Call) -> Shadow:
    """Each row of one with each row of the other."""
    a, b = call["x1"], call["x2"]
    left, right = call.settled(a), call.settled(b)
    rows = any_over(call.words(left), (a.dim() - 1,), keepdim=True)
    columns = any_over(call.words(right), (b.dim() - 1,), keepdim=True).transpose(-3, -2)
    known = left.known.all(-1, keepdim=True) & right.known.all(-1, keepdim=True).transpose(-2, -1)
    return Shadow(known.expand(call.out.shape), (rows | columns).expand(*call.out.shape, call.width))


@rule("aten.renorm")
def renorm(call: Call) -> Shadow:
    """Each slice along a dim by itself."""
    value = call["self"]
    dims = [d for d in range(value.dim()) if d != call["dim"] % value.dim()]
    words = any_over(call.words(call.settled(value)), dims, keepdim=True)
    return Shadow(constant(value.shape, False).known, words.expand(*value.shape, call.width))
