"""The miniature of any plan: a small model and at most sixteen ranks that do all that the large ones do.

Of every kind of repeated block as many stay as there are stages, every axis of the mesh has two ranks or three, and
every dim is a few times as long as it has shards. The step is the captured one: its graphs with other sizes, so any
model has a miniature, whatever it is made by.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.compiler.analysis.blocks import fold
from meshwright.compiler.equivalence.atoms import Atom, product
from meshwright.compiler.equivalence.cuts import axes_of, new_sizes
from meshwright.compiler.equivalence.lookups import ignored, tokens
from meshwright.compiler.equivalence.shrink import Shrunk, shrink
from meshwright.compiler.equivalence.sizes import Sizes, sizes_of
from meshwright.compiler.equivalence.small_plan import small_mesh, small_microbatches, small_plan
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import StepProgram, TensorSpec, Value, annotation
from meshwright.compiler.mesh import Segment, Sharding
from meshwright.compiler.passes.facts import repeated_blocks
from meshwright.compiler.passes.layouts import batch_sharding, layouts
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.stages import block_order, even_cuts
from meshwright.compiler.passes.treated import present
from meshwright.compiler.plan import PIPE, Plan, Recompute, Save
from meshwright.runtime.data import RandomSource
from meshwright.summaries import treatments
from meshwright.verification import Verification, verify, whole_batch_of

RATE = 1e-7
"""The learning rate of a miniature, at most."""


@dataclass(frozen=True)
class Miniature:
    """A small step and plan, and what fell short."""

    program: StepProgram
    plan: Plan
    high: Mapping[str, int]
    """By tensor of the batch: below which its integers are drawn."""
    ignored: Mapping[str, int]
    """By tensor of the batch: the number by which elements are marked that do not count."""
    notes: tuple[str, ...] = field(default=())


def miniature_of(program: StepProgram, plan: Plan) -> Miniature:
    """The miniature of a step under a plan."""
    mesh = small_mesh(plan.mesh)
    stages = _stages(plan)
    blocks = repeated_blocks(_labels(program))
    saves = treatments(blocks, plan.recompute)
    folded = fold(program, saves, kept=max(2, stages)).program
    outline = replace(plan, pipeline=None, recompute=_named(folded, saves))
    shardings = _shardings(folded, outline)
    microbatches = small_microbatches(plan)

    def choose(sizes: Sizes) -> dict[Atom, int]:
        cuts = axes_of(sizes, shardings, plan.mesh)
        return new_sizes(folded, sizes, cuts, plan, mesh, microbatches)

    shrunk = shrink(folded, choose)
    order = block_order(shrunk.program.micro.module.graph)
    first_blocks = even_cuts(order, stages) if plan.pipeline is not None else ()
    small = small_plan(
        outline if plan.pipeline is None else replace(outline, pipeline=plan.pipeline), folded, shrunk, first_blocks
    )
    return Miniature(shrunk.program, small, shrunk.high, _ignored(shrunk.program), tuple(_notes(plan, small, shrunk)))


def as_it_is(program: StepProgram, plan: Plan) -> Miniature:
    """A step that is small already, under its own plan."""
    high: dict[str, int] = {}
    for lookup, table in sizes_of(program).lookups:
        for name in lookup.batch or ():
            high[name] = min(high.get(name, 1 << 62), product(table))
    return Miniature(program, plan, high, _ignored(program))


def verify_miniature(
    program: StepProgram, plan: Plan, *, steps: int = 2, seed: int = 0
) -> tuple[Verification, Miniature]:
    """Run the miniature of a plan on the virtual cluster and compare it with its own step for one device."""
    small = miniature_of(program, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = compile_plan(small.program, small.plan, verify=False)
    return run_miniature(small, compiled, steps, seed), small


def run_miniature(small: Miniature, compiled: Compiled, steps: int = 2, seed: int = 0) -> Verification:
    """Compare a program of a miniature with the step for one device, gradients and weights, in float64."""
    source = RandomSource(small.program, seed=seed, high=dict(small.high))

    def batch(step: int) -> dict[str, Tensor]:
        made = whole_batch_of(source, small.program, step)
        return {name: _marked(name, x, small, step) for name, x in made.items()}

    # a small rate, so that the second step shows no more of the rounding of the first than it has to
    scalars = {n: min(v, RATE) if n.endswith("/lr") else v for n, v in small.program.scalars.items()}
    return verify(compiled, weights_of, batch, lambda step: scalars, steps, seed)


def weights_of(name: str, spec: TensorSpec) -> Tensor:
    """Weights that depend on the name alone, of a size that keeps what is computed near one."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    fan = math.prod(spec.shape[1:]) if len(spec.shape) > 1 else 4
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype)
    drawn = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    return (drawn.abs() + 0.5 if len(spec.shape) < 2 else drawn / math.sqrt(fan)).to(spec.dtype)


def _marked(name: str, x: Tensor, small: Miniature, step: int) -> Tensor:
    """Of labels some are marked as not counting, in every sample another number of them."""
    if name not in small.ignored or x.is_floating_point() or x.dim() < 2:
        return x
    length = x.shape[-1]
    rows = torch.arange(x.numel() // length).view(x.shape[:-1])
    kept = 2 + (rows * 3 + step) % max(1, length - 1)  # the first may fall away where labels are shifted
    return torch.where(torch.arange(length) < kept.unsqueeze(-1), x, small.ignored[name])


def _ignored(program: StepProgram) -> dict[str, int]:
    """By tensor of the batch: the number that marks what does not count, of labels that are no tokens as well."""
    found: dict[str, int] = {}
    read: set[str] = set()
    for graph in (program.prologue, program.micro):
        roles = {node: value for value, node in graph.placeholders().items()}
        found |= ignored(graph.module.graph, roles)
        read |= tokens(graph.module.graph, roles)
    return {name: number for name, number in found.items() if name not in read}


def _labels(program: StepProgram) -> list[str]:
    return [annotation(n).block for n in program.micro.module.graph.nodes]


def _stages(plan: Plan) -> int:
    """As many for each rank of the pipeline as there were."""
    if plan.pipeline is None:
        return 1
    each = (len(plan.pipeline.first_blocks) + 1) // plan.mesh.size(PIPE)
    return each * small_mesh(plan.mesh).size(PIPE)


def _named(program: StepProgram, saves: Mapping[str, Save]) -> tuple[Recompute, ...]:
    return present(program.micro, [Recompute(name, save) for name, save in saves.items() if save != "all"])


def _shardings(program: StepProgram, plan: Plan) -> dict[Value, list[Sharding]]:
    """How weights of the large step are cut while they are computed with, and its batch."""
    found: dict[Value, list[Sharding]] = {}
    for name, lies in layouts(program, plan).items():
        found[Value("parameter", name)] = [lies.compute]
    for name, spec in program.batch.items():
        dim = program.batch_dims.get(name)
        found[Value("batch", name)] = [batch_sharding(spec.shape, dim, plan, micro=False)]
        if dim is not None:
            # activations are cut along time as well, which the batch has as its second dim
            cut = (Segment(n, plan.sequence if d == dim + 1 else ()) for d, n in enumerate(spec.shape))
            found[Value("batch", name)].append(Sharding(tuple((s,) for s in cut)))
    return found


def _notes(plan: Plan, small: Plan, shrunk: Shrunk) -> list[str]:
    notes = []
    if lost := [n for n, size in plan.mesh.axes if size > 1 and small.mesh.size(n) == 1]:
        notes.append(f"the axes {', '.join(lost)} have one rank in the miniature, since it has no more than sixteen")
    if shrunk.kept:
        notes.append(f"sizes stay where {', '.join(shrunk.kept[:4])} depend on them")
    if not shrunk.new:
        notes.append("no size could be made smaller")
    return notes
