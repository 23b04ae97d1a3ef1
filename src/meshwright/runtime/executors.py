"""The executor of a rank, by what was compiled."""

from __future__ import annotations

import torch

from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.runtime.executor import Executor
from meshwright.runtime.finite import OnNonFinite
from meshwright.runtime.holdings import Holdings
from meshwright.runtime.mail import Mail
from meshwright.runtime.pipeline import PipelineExecutor
from meshwright.runtime.step_executor import RankCommunicator, StepExecutor


def executor_for(
    rank_program: Compiled,
    communicator: RankCommunicator,
    mail: Mail,
    holdings: Holdings,
    *,
    on_non_finite: OnNonFinite = "stop",
    keep_gradients: bool = False,
    device: torch.device | str = "cpu",
) -> StepExecutor:
    """``mail`` is used where there is a pipeline."""
    if isinstance(rank_program, PipelineProgram):
        return PipelineExecutor(
            rank_program,
            communicator,
            mail,
            holdings,
            on_non_finite=on_non_finite,
            keep_gradients=keep_gradients,
            device=device,
        )
    return Executor(
        rank_program,
        communicator,
        holdings,
        on_non_finite=on_non_finite,
        keep_gradients=keep_gradients,
        device=device,
    )
