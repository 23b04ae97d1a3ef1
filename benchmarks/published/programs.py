"""From a row to the summary of its rank program: built, captured, compiled and read off, once for each distinct row.

Summaries are kept on disk beside a key of everything that they depend on, the compiler's own source included.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

import meshwright
from benchmarks.published import modules, plans
from benchmarks.published.rows import Habits, Layout, Row, Shape
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.analysis.summarize_stages import summarize_stages
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.stages import block_order
from meshwright.compiler.passes.take_apart import take_apart
from meshwright.compiler.passes.untie import untie
from meshwright.compiler.summary import RankSummary, StagedSummary
from meshwright.frontend.capture import capture

PRICING = (
    "compiler/cluster", "compiler/timeline", "compiler/search", "compiler/memory.py", "compiler/repetition.py",
    "compiler/prediction.py",
)  # fmt: skip
"""What only prices a summary: a change there leaves the summary as it is."""
RELEVANT = ("compiler/", "frontend/capture/")


@dataclass(frozen=True)
class Key:
    """What a row's summary depends on."""

    shape: Shape
    layout: Layout
    habits: Habits
    ranks: int

    @property
    def name(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]


def key(row: Row) -> Key:
    # how ops are run is not part of the program, nor is where it is cut by depth
    habits = replace(row.habits, attention="", kernels="")
    layout, pipe = row.layout, row.layout.pipe
    layout = replace(layout, pipe=2, virtual=1, schedule="zb" if layout.apart else "") if pipe > 1 else layout
    return Key(row.shape, layout, habits, row.machine.count // pipe)


Summary = RankSummary | StagedSummary


class Programs:
    """Summaries by row. ``folder`` None: nothing is kept on disk. ``stale`` takes kept ones of any compiler."""

    def __init__(self, folder: Path | None, stale: bool = False) -> None:
        self._folder = folder / ("any" if stale else source_hash()) if folder else None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._captured: tuple[object, StepProgram] | None = None

    def summary(self, row: Row) -> Summary:
        """The summary of a row, to be cut by depth if it has a pipeline. Raises MeshwrightError where the plan cannot
        be followed."""
        wanted = key(row)
        path = self._folder / f"{wanted.name}.pickle" if self._folder else None
        if path is not None and path.exists():
            found = pickle.loads(path.read_bytes())
            assert isinstance(found, (RankSummary, StagedSummary))
            return found
        made = self._made(row)
        if path is not None:
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(pickle.dumps(made))
            os.replace(file.name, path)
        return made

    def _made(self, row: Row) -> Summary:
        program = self._program(row)
        if row.layout.pipe > 1:
            tied = untie(program, block_order(program.micro.module.graph)[1:])
            taken = take_apart(tied, plans.plan(program, row), apart=row.layout.apart)
            return summarize_stages(taken, plans.groups(row), plans.repeats(row))
        return summarize(compile_step(program, plans.plan(program, row), verify=False), plans.repeats(row))

    def _program(self, row: Row) -> StepProgram:
        """The captured step; rows in a sensible order share the last one."""
        about = _about(row)
        if self._captured is None or self._captured[0] != about:
            self._captured = (about, captured(row))
        return self._captured[1]


def captured(row: Row) -> StepProgram:
    """The step of a row for one device: loss, gradients, clipping and AdamW, on the whole global batch."""
    model = modules.module(row.shape, row.habits, len(plans.arrangement(row)))
    tokens = torch.empty(row.layout.batch, row.shape.time, dtype=torch.int64, device="meta")
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if row.habits.master_weights:
        optimizer = modules.MasterAdamW(weights)
    else:
        optimizer = torch.optim.AdamW(weights, lr=1e-4, foreach=False)
    return capture(
        model,
        {"input_ids": tokens, "labels": tokens},
        optimizer,
        clip=1.0,
        precision=plans.precision(row.habits),
    )


def prepare(rows: list[Row], programs: Programs, tell: Callable[[str], None]) -> list[Summary | str]:
    """The summary of each row, or why there is none. Rows that share a captured step are compiled one after another."""
    found: list[Summary | str] = [""] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: repr(_about(rows[i])))
    for number, place in enumerate(order):
        try:
            found[place] = programs.summary(rows[place])
        except meshwright.MeshwrightError as fault:
            found[place] = f"its plan cannot be compiled: {fault}".splitlines()[0]
        except Exception as fault:  # a row may ask for anything; whatever it is, it is told beside the row
            found[place] = f"it cannot be built: {type(fault).__name__}: {fault}".splitlines()[0]
        if number % 20 == 19:
            tell(f"{number + 1} of {len(order)} programs")
    return found


def _about(row: Row) -> tuple[object, ...]:
    """What a captured step depends on."""
    # how much is recomputed and how ops are run is not part of it
    written = replace(row.habits, recompute="", recomputed_share=0.0, cheap_again=False, attention="", kernels="")
    return (row.shape, len(plans.arrangement(row)), row.layout.batch, written)


@cache
def source_hash() -> str:
    """A hash of the source that makes summaries."""
    root = Path(meshwright.__file__).parent
    total = hashlib.sha256(torch.__version__.encode())
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(RELEVANT) and not name.startswith(PRICING):
            total.update(path.read_bytes())
    for module in (modules, plans):
        total.update(Path(str(module.__file__)).read_bytes())
    return total.hexdigest()[:16]
