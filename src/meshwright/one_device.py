"""The step as one device does it, from given weights on: what a compiled program is compared with.

Where the plan declares that groups of the batch stand for the whole, one device does them one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.single import run_single
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.plan import Declaration, Plan
from meshwright.runtime.materialize import Weights
from meshwright.runtime.virtual import VirtualCluster


@dataclass(frozen=True)
class Done:
    """What a step gave: gradients before clipping; parameters, buffers and the optimizer's state after the update."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    state: Mapping[str, Tensor]


class OneDevice:
    """Steps of one device. ``parameters`` and ``buffers`` are whole, and those that ``weights`` give."""

    def __init__(
        self,
        compiled: Compiled,
        weights: Weights,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        seed: int,
    ) -> None:
        self._program, self._seed, self._steps = compiled.program, seed, 0
        self._parameters, self._buffers = parameters, buffers
        self._state: Mapping[str, Tensor] | None = None
        groups = groups_of(compiled.plan)
        self._groups: VirtualCluster | None = None
        if groups > 1:
            alone = compile_step(compiled.program, _alone(compiled.plan, groups))
            self._groups = VirtualCluster(alone, weights, seed=seed, keep_gradients=True)

    def step(self, batch: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Done:
        """The next step."""
        number, self._steps = self._steps, self._steps + 1
        if self._groups is not None:
            groups, result = self._groups, self._groups.step(batch, scalars)
            return Done(
                result.loss,
                result.norm or 0.0,
                groups.full_gradients(),
                groups.full_parameters(),
                groups.full_buffers(),
                groups.full_state(),
            )
        done = run_single(
            self._program, self._parameters, self._buffers, self._state, batch, self._seed, number, scalars
        )
        self._parameters, self._buffers, self._state = done.parameters, done.buffers, done.state
        return Done(float(done.loss), float(done.norm), done.gradients, done.parameters, done.buffers, done.state)


def groups_of(plan: Plan) -> int:
    """In how many groups of the batch couplings of samples are computed, each by itself; 1: they are global."""
    meanings = {entry.meaning for entry in plan.separability}
    ranks = plan.mesh.size(*plan.batch) if "per data rank" in meanings else 1
    return plan.microbatches * ranks if meanings - {"global"} else 1


def _alone(plan: Plan, groups: int) -> Plan:
    """The same groups on one rank, as its microbatches."""
    declared = tuple(
        entry if entry.meaning == "global" else Declaration(entry.pattern, "per microbatch")
        for entry in plan.separability
    )
    # over data ranks that is what nothing is declared of, and here they are microbatches
    declared += (Declaration("**", "global"),)
    mesh = Mesh((("replica", 1),))
    return Plan(mesh, ("replica",), groups, precision=plan.precision, separability=declared)
