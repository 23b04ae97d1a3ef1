"""The executor of a rank, by what was compiled."""

from __future__ import annotations

from typing import Unpack

from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.runtime.executor import Executor
from meshwright.runtime.holdings import Holdings
from meshwright.runtime.mail import Mail
from meshwright.runtime.pipeline import PipelineExecutor
from meshwright.runtime.step_executor import Options, RankCommunicator, StepExecutor


def executor_for(
    rank_program: Compiled,
    communicator: RankCommunicator,
    mail: Mail,
    holdings: Holdings,
    **options: Unpack[Options],
) -> StepExecutor:
    """``mail`` is used where there is a pipeline."""
    if isinstance(rank_program, PipelineProgram):
        return PipelineExecutor(rank_program, communicator, mail, holdings, **options)
    return Executor(rank_program, communicator, holdings, **options)
