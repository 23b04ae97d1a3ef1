"""Capture: an ``nn.Module`` with its loss and its ``torch.optim`` optimizer becomes a StepProgram."""

from __future__ import annotations

from meshwright.compiler.graph import ops  # registers the ops that captured graphs call
from meshwright.frontend.capture.capture import capture

__all__ = ["capture", "ops"]
