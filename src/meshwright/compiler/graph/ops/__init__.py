"""Meshwright's own ops, ``torch.ops.meshwright.*``: importing this package registers all of them.

They are few, and each exists because the ATen form hides what a partitioner must know: which
dims a contraction sums (``einsum``), which element of the whole tensor a random number belongs
to (``dropout``), which rows of a table a shard holds (``embedding``, ``cross_entropy_backward``,
``pick``), that an attention is causal (``attention``), how little a norm keeps for backward
(``rms_norm``), that each row of a product has weights of its own (``routed_mm``), and into how
many bins numbers are counted (``count``). ``to_device`` and ``to_host`` come in by a pass alone.
"""

from __future__ import annotations

from meshwright.compiler.graph.ops import attention, contraction, lookup, loss, norm, random, routed, transfer

__all__ = ["attention", "contraction", "lookup", "loss", "norm", "random", "routed", "transfer"]
