"""What every rank runs: the three graphs with local shapes and explicit communication.

The ranks of a mesh run the same program and differ only in their mesh coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from meshwright.compiler.graph.program import Signature, StepProgram, Value
from meshwright.compiler.mesh import Mesh, Sharding
from meshwright.compiler.plan import Plan


@dataclass(frozen=True)
class Layout:
    """How one parameter lies: at rest, in computation, its gradient accumulator, its optimizer state.

    ``gradient`` may owe sums: the accumulator then holds this rank's part, and ``update`` pays.
    """

    rest: Sharding
    compute: Sharding
    gradient: Sharding
    state: Sharding


@dataclass
class LocalGraph:
    """A graph of one rank. Inputs and outputs are local tensors that lie as the shardings say.

    In ``micro`` the mesh has the sequential axis ``micro`` in front: batch inputs are cut by it,
    and outputs that owe a sum over it (loss, gradients) are added up over the microbatches.
    """

    module: fx.GraphModule
    signature: Signature
    inputs: dict[Value, Sharding]
    outputs: dict[Value, Sharding]


@dataclass
class RankProgram:
    """The program of one rank, with all that the runtime needs to feed it."""

    program: StepProgram
    """The step for one device that this was made from."""
    plan: Plan
    mesh: Mesh
    """The device mesh (without ``micro``)."""
    prologue: LocalGraph
    micro: LocalGraph
    update: LocalGraph
    layouts: dict[str, Layout]
    """By canonical parameter name."""
    state: dict[str, Sharding]
    """By ``<parameter>/<entry>``; scalars such as step counters are whole."""

    @property
    def micro_graphs(self) -> tuple[LocalGraph, ...]:
        """The graphs that run once for each microbatch."""
        return (self.micro,)

    @property
    def update_graphs(self) -> tuple[LocalGraph, ...]:
        """The graphs that run once at the end of a step."""
        return (self.update,)

    @property
    def graphs(self) -> tuple[LocalGraph, ...]:
        return (self.prologue, self.micro, self.update)
