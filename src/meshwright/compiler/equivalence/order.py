"""A pipeline's passes: does every one run once for every microbatch, where its stage is held?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from meshwright.compiler.equivalence.findings import SCHEDULE, Finding
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.stage_messages import waiting_of
from meshwright.compiler.schedules.instructions import Compute
from meshwright.compiler.schedules.lower import UPDATE
from meshwright.compiler.schedules.table import Action, parse_rows

GRAPH = "the schedule"


def check_order(program: PipelineProgram) -> Iterator[Finding]:
    """Passes that are left out, come twice, or stand at ranks that do not have their stage."""
    ran: Counter[tuple[int, str, int]] = Counter()
    waiting = waiting_of(program.stages)
    for pipe, instructions in enumerate(program.programs):
        updates = 0
        for instruction in instructions:
            if not isinstance(instruction, Compute):
                continue
            if instruction.name == UPDATE:
                updates += 1
                continue
            for action in parse_rows(instruction.name)[0][0]:
                for one in action.passes:
                    ran[one.stage, one.kind, one.microbatch] += 1
                    if waiting is not None and (one.stage, one.kind) in waiting.meets:
                        yield from _met(one, waiting.meets[one.stage, one.kind], pipe, program, ran)
                holder = program.schedule.rank(action)
                if holder != pipe:
                    message = f"{action} runs at pipe={pipe}, and its stage is held by pipe={holder}"
                    yield Finding(SCHEDULE, GRAPH, str(action), message)
        if updates != 1:
            yield Finding(SCHEDULE, GRAPH, "", f"pipe={pipe} updates its weights {updates} times in a step", "", "once")
    for stage, found in enumerate(program.stages):
        for kind in found.passes:
            for microbatch in range(program.schedule.microbatches):
                times = ran.pop((stage, kind, microbatch), 0)
                if times != 1:
                    message = f"stage {stage} runs its pass {kind} for microbatch {microbatch} {times} times"
                    yield Finding(SCHEDULE, GRAPH, f"{stage}{kind}{microbatch}", message, str(times), "once")
    for stage, kind, microbatch in ran:
        message = f"pass {kind} of stage {stage} runs for microbatch {microbatch}, which there is not"
        yield Finding(SCHEDULE, GRAPH, f"{stage}{kind}{microbatch}", message)


def _met(
    action: Action,
    met: Collection[tuple[int, str]],
    pipe: int,
    program: PipelineProgram,
    ran: Counter[tuple[int, str, int]],
) -> Iterator[Finding]:
    """Whether all microbatches that meet at the beginning of a pass have come before it; those of other ranks are
    waited for, which the check for deadlocks sees to."""
    for stage, kind in met:
        here = [
            i for i in range(program.schedule.microbatches) if program.schedule.rank(Action(kind, stage, i)) == pipe
        ]
        late = [i for i in here if not ran[stage, kind, i]]
        if late:
            message = f"{action} runs before microbatch {late[0]} has come to the meeting that it begins with"
            yield Finding(SCHEDULE, GRAPH, str(action), message)
