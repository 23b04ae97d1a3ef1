"""The one-line way in: ``parallelize`` turns a model, its optimizer and an example batch into a step.

step = meshwright.parallelize(model, optimizer=optimizer, batch=batch, plan="fsdp=2,tp=2")
for batch in loader:
    loss = step(batch)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.arguments import (
    checked_clip,
    checked_loss,
    checked_model,
    checked_optimizers,
    checked_plan,
    checked_precision,
    checked_seed,
    checked_virtual,
)
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.presets import LOCAL
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, error
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import StepProgram, TensorSpec
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.passes.separability import check_fits
from meshwright.compiler.plan import Declaration, Plan, Precision
from meshwright.compiler.plan_file import PlanFile, check_made_for, read_plan_file
from meshwright.compiler.schedules.of_plan import alone
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pins import Pins
from meshwright.compiler.separability_text import Separability, declarations
from meshwright.frontend.capture import capture
from meshwright.frontend.capture.batch import as_call, check_fixed, fixed, tensors
from meshwright.frontend.capture.fingerprint import hashes_of
from meshwright.groups import ParameterGroups
from meshwright.planning import AUTO, cluster_of, plan_program
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint_planner import Shards
from meshwright.runtime.communicator import ProcessCommunicator, axes_used
from meshwright.runtime.executors import executor_for
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.gather import full_state_dict
from meshwright.runtime.joined import explained, join
from meshwright.runtime.mail import ProcessMail
from meshwright.runtime.materialize import Weights, from_module, materialize, names_of
from meshwright.runtime.step_executor import StepResult
from meshwright.runtime.virtual import VirtualCluster


def parallelize(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    batch: Any,
    plan: str | Path | Plan = "fsdp",
    loss: Callable[..., Any] | None = None,
    clip: float | None = None,
    precision: Precision | str | None = None,
    separability: Separability | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    virtual: int | None = None,
    seed: int = 0,
    cluster: str | Path | Cluster = LOCAL,
) -> Step:
    """Compile the training step of a model and bring its weights onto the ranks.

    ``batch`` is an example of the *whole global* batch, in the form in which ``step(batch)`` will get it: a
    tensor, a tuple (positional), a dict (keyword) or ``(args, kwargs)``. Every rank is given the same batch
    and takes its rows. ``plan`` is a preset (``fsdp=2,tp=2``), the path of a plan file, or a Plan.
    ``loss(output, batch)`` is needed where the model does not return its loss. ``clip`` is the largest
    global gradient norm. ``optimizer`` may be several, each of which owns a part of the parameters (Muon for
    the matrices and AdamW for the rest, say). Learning rates are read from ``param_groups`` at each step, so
    the user's own scheduler goes on working. ``precision`` is a Precision or the name of the dtype to compute in
    (``"bf16"``, with weights in fp32); if None, that of the plan if the plan says one, else that of the model.
    ``separability`` declares what couplings of samples (batch statistics, balance losses) mean when the batch is cut
    into microbatches: ``"global"``, ``"per microbatch"`` or ``"per data rank"``, for all of them, or by module, line or
    kind (``{"encoder.*.norm": "global", "loss.py:31": "global"}``); if None, as the plan says.
    ``batch_dims`` says by name which dim of a tensor is the batch, where it cannot be seen.

    ``plan="auto"`` lets the planner choose for ``cluster``: a preset (``h100x8``), a cluster file, or a Cluster.

    Run it under ``torchrun`` (the weights of rank 0 count), or with ``virtual=N`` on a virtual cluster of N ranks
    in this process. Raises MeshwrightError for what cannot be captured, cut or run.
    """
    model, optimizers, plan = checked_model(model), checked_optimizers(optimizer), checked_plan(plan)
    clip, precision = checked_clip(clip), checked_precision(precision)
    seed, virtual = checked_seed(seed), checked_virtual(virtual)
    checked_loss(loss)
    ranks = virtual or join()
    given = _given(plan)
    if given is not None and precision is None:
        precision = given.plan.precision
    declared = declarations(separability)
    program = capture(model, batch, optimizers, loss, clip, batch_dims=batch_dims, precision=precision)
    check_fits(program, declared or (given.plan.separability if given is not None else ()))
    if plan == AUTO:
        made = _planned(program, cluster, ranks, precision, declared)
    else:
        made = (
            preset(str(plan), program, ranks, precision, declared)
            if given is None
            else given.made_for(program, precision)
        )
    made = replace(made, separability=declared or made.separability)
    if plan != AUTO:
        for diagnostic in alone(made, program.batch_size):
            warnings.warn(diagnostic.render(), stacklevel=2)
    if made.mesh.ranks != ranks:
        raise error(
            "E0601",
            f"the plan is for {made.mesh.ranks} ranks ({made.mesh}), but there are {ranks}",
            None,
            f"start it with torchrun --nproc-per-node {made.mesh.ranks}, or use virtual={made.mesh.ranks}",
        )
    try:
        rank_program = compile_plan(program, made)
    except MeshwrightError as fault:
        raise MeshwrightError(*(given.located(d) if given else d for d in fault.diagnostics)) from None
    engine = _Virtual(rank_program, model, seed) if virtual else _Process(rank_program, model, seed)
    passing = frozenset(n for n, _ in model.named_buffers(remove_duplicate=False)) - model.state_dict().keys()
    return Step(rank_program, engine, optimizers, passing, fixed(as_call(batch)))


class Step:
    """One training step on all ranks: ``loss = step(batch)`` computes gradients, clips and updates the weights."""

    def __init__(
        self,
        rank_program: Compiled,
        engine: _Virtual | _Process,
        optimizers: Sequence[torch.optim.Optimizer],
        passing: frozenset[str],
        fixed: Mapping[str, Any],
    ) -> None:
        self.rank_program = rank_program
        self.steps = 0
        """The number of steps done."""
        self.norm: float | None = None
        """The global gradient norm of the last step, before clipping."""
        self._engine = engine
        self._groups = ParameterGroups(optimizers, rank_program.program)
        self._fixed = fixed  # numbers and strings of the batch, which are a part of the program
        self._passing = passing  # buffers that the model itself leaves out of its state dict

    @property
    def plan(self) -> Plan:
        """The plan that the step follows."""
        return self.rank_program.plan

    def __call__(self, batch: Any) -> Tensor:
        """Run one step on a whole global batch. Returns its loss, the same on every rank (float64, shape []).

        The step has done what ``loss.backward()`` and ``optimizer.step()`` would: the loss is a plain number
        without a graph behind it.
        """
        call = as_call(batch)
        found = tensors(call)
        check_fixed(call, self._fixed)
        result = self._engine.step(found, self.steps, self._groups.scalars())
        self.steps += 1
        self.norm = result.norm
        self._groups.mark_stepped()
        return torch.tensor(result.loss, dtype=torch.float64)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole weights and buffers, named as in ``model.state_dict()``. All ranks call it together."""
        return {n: t for n, t in self._engine.full_state_dict().items() if n not in self._passing}

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint that any mesh can load, and return its folder. All ranks call it together."""
        return checkpoint.save(self._engine.shards(), folder, step=self.steps, seed=self._engine.seed)

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint (or the newest one of a folder): weights, optimizer state, step, random seed."""
        record = checkpoint.load(self._engine.shards(), Path(folder))
        self.steps = record.step
        self._engine.seed = record.seed


class _Virtual:
    """All ranks in this process."""

    def __init__(self, rank_program: Compiled, model: nn.Module, seed: int) -> None:
        self.cluster = VirtualCluster(rank_program, from_module(model), seed=seed)
        self.seed = seed

    def step(self, batch: Mapping[str, Tensor], step: int, scalars: Mapping[str, float]) -> StepResult:
        self.cluster.steps, self.cluster.seed = step, self.seed
        return self.cluster.step(batch, scalars)

    def full_state_dict(self) -> dict[str, Tensor]:
        whole = {**self.cluster.full_parameters(), **self.cluster.full_buffers()}
        names = {p.name: names_of(p) for p in self.cluster.rank_program.program.parameters}
        return {alias: t for name, t in whole.items() for alias in names.get(name, (name,))}

    def shards(self) -> Shards:
        mesh = self.cluster.mesh
        return Shards(
            self.cluster.rank_program, [(mesh.coordinates(r), h) for r, h in enumerate(self.cluster.holdings)]
        )


class _Process:
    """This process is one rank."""

    def __init__(self, rank_program: Compiled, model: nn.Module, seed: int) -> None:
        self.seed = seed
        mesh = rank_program.mesh
        self.communicator = communicator = ProcessCommunicator(
            mesh, rank_program.plan.microbatches, axes_used(rank_program)
        )
        device = _device()
        weights, own = _from_rank_0(from_module(model), device), [mesh.coordinates(communicator.rank)]
        (holdings,) = materialize(rank_program, weights, own, device=device, together=True)
        mail = ProcessMail(communicator)
        self.executor = executor_for(rank_program, communicator, mail, holdings, device=device)

    def step(self, batch: Mapping[str, Tensor], step: int, scalars: Mapping[str, float]) -> StepResult:
        feed = whole_batch(batch, self.executor.rank_program.program)
        with explained(self.communicator):
            return self.executor.step(feed, step=step, seed=self.seed, scalars=scalars)

    def full_state_dict(self) -> dict[str, Tensor]:
        with explained(self.communicator):
            return full_state_dict(self.executor)

    def shards(self) -> Shards:
        coordinates = self.executor.rank_program.mesh.coordinates(self.executor.communicator.rank)
        return Shards(self.executor.rank_program, [(coordinates, self.executor.holdings)])


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _from_rank_0(weights: Weights, device: torch.device) -> Weights:
    """Rank 0's weights on every rank, one tensor at a time, however each rank seeded its model."""

    def give(name: str, spec: TensorSpec) -> Tensor:
        whole = weights(name, spec).detach().to(device).contiguous().clone()
        dist.broadcast(whole, 0)
        return whole

    return give


@dataclass(frozen=True)
class _Given:
    """A plan that was given as such, and the file that it was read from."""

    plan: Plan
    file: PlanFile | None = None

    def made_for(self, program: StepProgram, precision: Precision | None) -> Plan:
        """The plan, if it was made for this program. Raises E0310."""
        place = self.file.toml.value("made_for", "model") if self.file is not None else None
        for diagnostic in check_made_for(self.plan, hashes_of(program), place):
            warnings.warn(diagnostic.render(), stacklevel=3)
        return replace(self.plan, precision=precision or self.plan.precision)

    def located(self, diagnostic: Diagnostic) -> Diagnostic:
        """The diagnostic, at the line of the file that it is about."""
        return self.file.located(diagnostic) if self.file is not None else diagnostic


def _planned(
    program: StepProgram,
    cluster: str | Path | Cluster,
    ranks: int,
    precision: Precision | None,
    declared: tuple[Declaration, ...],
) -> Plan:
    """The planner's choice; that of rank 0 counts, whose machine may be another one."""
    limits = Limits(pins=Pins(separability=declared or None))

    def chosen() -> Plan:
        return plan_program(program, cluster_of(cluster, ranks), ranks=ranks, limits=limits, precision=precision).plan

    if not dist.is_initialized():
        return chosen()
    told: list[Plan | MeshwrightError | None] = [None]
    if dist.get_rank() == 0:
        try:
            told = [chosen()]
        except MeshwrightError as fault:
            told = [fault]
    dist.broadcast_object_list(told, 0)
    if isinstance(told[0], MeshwrightError):
        raise told[0]
    assert told[0] is not None
    return told[0]


def _given(plan: str | Path | Plan) -> _Given | None:
    """The plan that is given as a Plan or as a file; None if it is a preset."""
    if isinstance(plan, Plan):
        return _Given(plan)
    if isinstance(plan, Path) or plan.endswith(".toml"):
        file = read_plan_file(Path(plan))
        return _Given(file.plan, file)
    return None
