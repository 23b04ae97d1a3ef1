"""From a candidate of the search to a plan for a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.tensor_parallel import TensorCut, tensor_cut
from meshwright.compiler.plan import Hashes, Pipeline, Plan, Precision, Recompute, Storage
from meshwright.compiler.search.candidate import DATA, REPLICA, TENSOR, Candidate
from meshwright.compiler.search.pins import Pins


class Realiser:
    """Makes plans for one program; what tensor parallelism cuts is found once for each degree."""

    def __init__(
        self,
        program: StepProgram,
        precision: Precision,
        blocks: Iterable[str] = (),
        parameters: Mapping[str, str] | None = None,
        pins: Pins | None = None,
    ) -> None:
        self.program = program
        self.precision = precision
        self.blocks = tuple(blocks)
        """Patterns of the repeated blocks, for recomputation."""
        self.parameters = parameters or {p.name: p.name for p in program.parameters}
        """All names, and by each the parameter of ``program`` that it is cut like."""
        self._pins = pins or Pins()
        self._cuts: dict[tuple[int, tuple[str, ...]], TensorCut] = {}

    def plan(
        self,
        candidate: Candidate,
        pipeline: Pipeline | None = None,
        recompute: tuple[Recompute, ...] | None = None,
    ) -> Plan:
        """The plan of a candidate; ``pipeline`` says where one with a pipe axis is cut, ``recompute`` what its blocks
        keep if stages differ. Raises MeshwrightError E0306 where tensor parallelism finds nothing to cut."""
        axes: list[tuple[str, int]] = []
        tensor: tuple[str, ...] = ()
        cut = None
        placed = self._pins.placed if self._pins.tensor == candidate.size(TENSOR) else None
        for name, size in candidate.axes:
            if name == TENSOR and placed is not None:
                axes += placed.axes
                tensor = tuple(axis for axis, _ in placed.axes)
            elif name == TENSOR:
                cut = self._cut(size, candidate.whole)
                axes += cut.axes
                tensor = tuple(axis for axis, _ in cut.axes)
            else:
                axes.append((name, size))
        if not axes:
            axes = [(REPLICA, 1)]
        mesh = Mesh(tuple(axes))
        parameters = placed.parameters if placed is not None else ()
        if cut is not None:
            parameters = cut.plans(mesh, self.parameters)
        data = (DATA,) if candidate.size(DATA) > 1 else ()
        return Plan(
            mesh=mesh,
            batch=tuple(name for name, _ in axes if name in (REPLICA, DATA)),
            microbatches=candidate.microbatches,
            storage=Storage(
                parameters=data if candidate.storage == 3 else (),
                gradients=data if candidate.storage >= 2 else (),
                state=data if candidate.storage >= 1 else (),
            ),
            sequence=tensor if candidate.sequence else (),
            parameters=parameters,
            precision=self.precision,
            numerics=self._pins.numerics or "warn",
            recompute=self._recompute(candidate) if recompute is None else recompute,
            offload=("state",) if candidate.offload else (),
            prefetch=candidate.prefetch,
            separability=self._pins.separability or (),
            pipeline=pipeline,
            hashes=Hashes(model=self.program.fingerprint, torch=torch.__version__),
            name=candidate.text,
        )

    def _cut(self, degree: int, whole: tuple[str, ...]) -> TensorCut:
        key = (degree, whole)
        if key not in self._cuts:
            self._cuts[key] = tensor_cut(self.program, degree, whole)
        return self._cuts[key]

    def _recompute(self, candidate: Candidate) -> tuple[Recompute, ...]:
        if candidate.save == "all":
            return self._pins.recompute or ()
        return tuple(Recompute(pattern, candidate.save, candidate.every) for pattern in self.blocks)
