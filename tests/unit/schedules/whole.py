"""Compiled steps whose programs are checked: with and without a pipeline, all kinds of axes and schedules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshwright.compiler.analysis.rank_instructions import rank_instructions
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.schedules.instructions import Program
from meshwright.compiler.schedules.symmetry import RankPrograms
from tests.models import Variant
from tests.parity.harness import Task, captured


@dataclass(frozen=True)
class Case:
    task: Task
    plan: str

    def __str__(self) -> str:
        return f"{self.task} | {self.plan}"


_TIED = Variant(layers=4, tied=True, dropout=0.1)
CASES = (
    Case(Task("Llama", _TIED), "pp=2,fsdp=2,tp=2,micro=4"),
    Case(Task("Llama", _TIED), "pp=2,schedule=zb-v,micro=4"),
    Case(Task("Llama", _TIED), "pp=2,ddp=2,schedule=dualpipe,micro=4"),
    Case(Task("Llama", _TIED), "pp=2,fsdp=2,prefetch,micro=2,recompute,schedule=zb-h1"),
    Case(Task("Llama", _TIED, clip=None), "pp=2,zero2=2,schedule=interleaved,micro=2"),
    Case(Task("T5", Variant(layers=4)), "pp=4,ddp=2,micro=4"),
    Case(Task("Llama", _TIED), "fsdp=2,tp=2,sp,prefetch,micro=2"),
    Case(Task("gpt.mw", Variant(layers=3)), "ddp=2,zero1=3"),
)


@cache
def compiled(case: Case) -> Compiled:
    program = captured(case.task)
    return compile_plan(program, preset(case.plan, program))


@cache
def programs_of(case: Case) -> RankPrograms:
    return rank_instructions(compiled(case))


@cache
def everyone_of(case: Case) -> tuple[Program, ...]:
    return programs_of(case).everyone()
