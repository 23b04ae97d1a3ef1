"""Meshwright's own ops, as they are written: their kernels run in torch's ops, which are seen one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from meshwright.compiler.causality.call import Call, tensors_in
from meshwright.compiler.causality.registry import replacement, rule
from meshwright.compiler.causality.shadow import Shadow
from meshwright.compiler.graph.ops.attention import plain_attention, plain_attention_backward
from meshwright.compiler.graph.ops.library import KERNELS

_WRITTEN = (
    "einsum logsumexp cross_entropy cross_entropy_backward rms_norm rms_norm_backward constant "
    "total sum_of_squares to_device"
).split()


@replacement(*(f"meshwright.{name}" for name in _WRITTEN))
def as_written(call: Call) -> Any:
    """What the kernel does."""
    kernel = KERNELS[call.name.split(".")[1]]
    with call.interpreter:
        made = kernel(*call.args, **call.kwargs)
    return _with_shadows(call, made)


@replacement("meshwright.embedding")
def embedding(call: Call) -> Any:
    """A row of the table by its index, or zero where another shard has the row: the index says which, as in a whole
    table."""
    out = call.func(*call.args, **call.kwargs)
    table = call["weight"]
    with call.interpreter:
        made = torch.ops.aten.embedding.default(table, (call["index"] - call["start"]) % max(table.shape[0], 1))
    return out, call.interpreter.memory.read(made)


@replacement("meshwright.embedding_backward")
def embedding_backward(call: Call) -> Any:
    """All gradients, each times whether its index is that of the row; the row of the padding gets none."""
    out = call.func(*call.args, **call.kwargs)
    grad, index = call["grad"], call["index"].reshape(-1)
    rows = torch.arange(call["rows"]) + call["start"]
    with call.interpreter:
        own = (index.unsqueeze(0) == rows.unsqueeze(1)) & (rows != call["padding_idx"]).unsqueeze(1)
        made = torch.matmul(own.to(grad.dtype), grad.reshape(-1, grad.shape[-1]))
    return out, call.interpreter.memory.read(made)


@replacement("meshwright.pick")
def pick(call: Call) -> Any:
    """Likewise an element of each row."""
    out = call.func(*call.args, **call.kwargs)
    rows = call["x"]
    with call.interpreter:
        place = (call["index"] - call["start"]) % max(rows.shape[-1], 1)
        made = rows.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    return out, call.interpreter.memory.read(made)


@rule("meshwright.dropout")
def dropout(call: Call) -> Shadow:
    """As the identity: what is dropped is by chance."""
    shadow = call.shadow(call["x"])
    return replace(shadow, known=shadow.known & (call["x"] == 0), rank=None)


@replacement("meshwright.attention")
def attention(call: Call) -> Any:
    """In its maths form: no fused kernel, of which nothing could be seen, and nothing dropped by chance."""
    given = {**call.arguments, "dropout": 0.0}
    with call.interpreter:
        made = plain_attention(*given.values())
    return _with_shadows(call, made)


@replacement("meshwright.attention_backward")
def attention_backward(call: Call) -> Any:
    """Likewise."""
    given = {**call.arguments, "dropout": 0.0}
    with call.interpreter:
        made = plain_attention_backward(*given.values())
    return _with_shadows(call, made)


@replacement("meshwright.to_host")
def to_host(call: Call) -> Any:
    """Writes a copy into the store."""
    with call.interpreter:
        return call["store"].copy_(call["x"])


def _with_shadows(call: Call, made: Any) -> Any:
    memory = call.interpreter.memory
    if isinstance(made, torch.Tensor):
        return made, memory.read(made)
    return made, [memory.read(one) for one in tensors_in(made)]
