"""How composite ops of an exported graph are written with Meshwright's ops. Listing this folder lists them all.

A lowering is called in place of the op while the step is traced, so it may compute with the tensors freely.
"""

from __future__ import annotations

from meshwright.frontend.capture.lowering import (
    attention,
    contraction,
    copying,
    cross_entropy,
    embedding,
    grouped,
    indexing,
    losses,
    mean,
    normalisation,
    random,
    views,
)
from meshwright.frontend.capture.lowering.site import LOWERINGS, Site, lowering_of

__all__ = [
    "LOWERINGS",
    "Site",
    "attention",
    "contraction",
    "copying",
    "cross_entropy",
    "embedding",
    "grouped",
    "indexing",
    "losses",
    "lowering_of",
    "mean",
    "normalisation",
    "random",
    "views",
]
