"""Attention masks that depend on positions alone: evaluated once, at compile time.

A causal mask, also with a sliding window, becomes a flag of the attention; one that hides nothing
vanishes; any other becomes a constant of the program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from meshwright.frontend.capture.constants import TooLarge, constant_nodes, evaluate
from meshwright.frontend.capture.lowering.site import Folded

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def fold_masks(graph: fx.Graph) -> tuple[dict[fx.Node, Folded], dict[str, Tensor]]:
    """What the constant masks are, by attention node, and those that stay as constants, by name.

    A mask that is too large to be evaluated stays computed in the step.
    """
    constant = constant_nodes(graph)
    values: dict[fx.Node, Any] = {}
    known: dict[fx.Node, Folded] = {}
    folded: dict[fx.Node, Folded] = {}
    constants: dict[str, Tensor] = {}
    for node in graph.nodes:
        mask = _mask(node)
        if mask is None or mask not in constant:
            continue
        if mask not in known:
            try:
                value = evaluate(mask, values)
            except TooLarge:
                constant.discard(mask)
                continue
            t, s = node.args[0].meta["val"].shape[-2], node.args[1].meta["val"].shape[-2]
            known[mask] = classify(value, t, s)
            if known[mask].constant:
                name = f"attention_mask_{len(constants)}"
                known[mask] = Folded(constant=name)
                constants[name] = value.contiguous()
        folded[node] = known[mask]
    return folded, constants


def _mask(node: fx.Node) -> fx.Node | None:
    if node.target is not ATTENTION:
        return None
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def classify(mask: Tensor, t: int, s: int) -> Folded:
    """What a mask of queries ``t`` and keys ``s`` says. ``constant`` is set to a placeholder if it must stay."""
    stays = Folded(constant="mask")
    seen = _seen(mask)
    if seen is None:
        return stays
    while seen.dim() > 2:
        if seen.stride(0) and not bool((seen == seen[:1]).all()):
            return stays
        seen = seen[0]
    if bool(seen.all()):
        return Folded()
    if t != s or seen.shape != (t, s):
        return stays
    # the window is how much the last query sees, if the mask is a causal one at all
    window = int(seen[-1].sum())
    query, key = torch.arange(t, dtype=torch.int32).unsqueeze(1), torch.arange(s, dtype=torch.int32)
    expected = key <= query if window == t else (key <= query) & (key > query - window)
    if torch.equal(seen, expected):
        return Folded(causal=True, window=0 if window == t else window)
    return stays


def _seen(mask: Tensor) -> Tensor | None:
    """The mask as "may see"; None for one that does more than to hide."""
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    # a bias of -inf or of the most negative number hides
    return seen if bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()) else None
