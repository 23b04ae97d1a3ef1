"""Faults that a compiler could make, each put into a compiled program that works: the tiers must tell every one."""

from __future__ import annotations

from tests.equivalence import faults_of_steps, faults_of_values  # noqa: F401  (importing them registers the faults)
from tests.equivalence.faulty import FAULTS, SHARDED, TENSOR, Fault

__all__ = ["FAULTS", "SHARDED", "TENSOR", "Fault"]
