"""The schedule that a plan asks for: one of the catalogue, or a table that was written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, Span, error
from meshwright.compiler.plan import PIPE, Pipeline, Plan
from meshwright.compiler.schedules import catalogue
from meshwright.compiler.schedules.request import Costs
from meshwright.compiler.schedules.simulate import Stuck, simulate
from meshwright.compiler.schedules.table import Action, Malformed, Row, Schedule, parse_rows


def alone(plan: Plan, batch: int, place: Span | None = None) -> tuple[Diagnostic, ...]:
    """The warning W0501 that a pipeline has one microbatch of a batch of several samples. ``place``: where the plan
    says so."""
    ranks = plan.mesh.size(PIPE) if plan.pipeline is not None and PIPE in plan.mesh.names else 1
    most = batch // plan.mesh.size(*plan.batch)
    if ranks < 2 or plan.microbatches > 1 or most < 2:
        return ()
    message = f"one microbatch goes through {ranks} ranks of '{PIPE}': each waits {ranks - 1}/{ranks} of a step"
    action = f"cut the batch of {batch} samples into microbatches, up to {most}, or leave the pipeline out"
    return (Diagnostic("W0501", message, place, action),)


def schedule_of(plan: Plan) -> Schedule:
    """The schedule of a plan with a pipeline.

    Raises MeshwrightError: E0501 for an unknown name, E0502 where the stages do not fill the ranks, E0506 for a table
    that cannot be read or leaves something out, E0507 for one that never comes to an end.
    """
    pipeline = plan.pipeline or Pipeline(())
    ranks, stages = plan.mesh.size(PIPE), len(pipeline.first_blocks) + 1
    if pipeline.table:
        return from_table(pipeline.schedule, pipeline.table, ranks, stages, plan.microbatches)
    if stages % ranks:
        more = -(-stages // ranks) * ranks
        message = f"{stages} stages cannot be shared out evenly over {ranks} ranks of '{PIPE}'"
        raise error("E0502", message, action=f"give {more - 1} first blocks, or change the size of '{PIPE}'")
    request = catalogue.request_for(pipeline.schedule, stages, plan.microbatches, stages // ranks, Costs())
    return catalogue.make(pipeline.schedule, request)


def from_table(name: str, text: str, ranks: int, stages: int, microbatches: int) -> Schedule:
    """The schedule of a table with a line for each rank. Raises MeshwrightError E0506 and E0507."""
    try:
        rows = parse_rows(text)
    except Malformed as fault:
        raise _wrong(f"line {fault.line}: {fault}") from None
    if len(rows) != ranks:
        raise _wrong(f"it has {len(rows)} lines, '{PIPE}' has {ranks} ranks")
    placement = tuple(_placement(rows, stages, microbatches))
    _check_complete(rows, placement, stages, microbatches)
    schedule = Schedule(name, placement, microbatches, rows)
    try:
        simulate(schedule)
    except Stuck as stuck:
        raise error(
            "E0507",
            f"the table of the schedule never comes to an end: {stuck}",
            action="let every action stand after those that it needs",
        ) from None
    return schedule


def _placement(rows: Sequence[Row], stages: int, microbatches: int) -> Iterator[tuple[int, ...]]:
    """The rank of each stage, for each direction in which microbatches go."""
    found: list[dict[int, int]] = [{}, {}]
    for rank, row in enumerate(rows):
        for action in (a for step in row for a in step):
            if action.kind[1:]:
                raise _wrong(f"line {rank + 1}: {action} is of a round: those follow from where microbatches meet")
            if action.stage >= stages:
                raise _wrong(f"line {rank + 1}: {action} is of stage {action.stage}, and there are {stages}, from 0 on")
            if action.microbatch >= microbatches:
                last = f"microbatch {action.microbatch}, and there are {microbatches}, from 0 on"
                raise _wrong(f"line {rank + 1}: {action} is of {last}")
            direction = action.microbatch * 2 // microbatches
            if found[direction].setdefault(action.stage, rank) != rank:
                other = found[direction][action.stage] + 1
                raise _wrong(f"line {rank + 1}: {action} is of a stage whose other actions are in line {other}")
    first, second = (tuple(d.get(stage, -1) for stage in range(stages)) for d in found)
    yield first
    if second != first and microbatches > 1:
        yield second


def _check_complete(rows: Sequence[Row], placement: Sequence[Sequence[int]], stages: int, microbatches: int) -> None:
    """Every stage does every microbatch once, forward and backward."""
    counts = Counter(action for row in rows for step in row for action in step)
    for action, count in counts.items():
        if count > 1:
            raise _wrong(f"{action} stands in it {count} times")
    for stage in range(stages):
        for microbatch in range(microbatches):
            kinds = "".join(k for k in "FBIW" if Action(k, stage, microbatch) in counts)
            if kinds not in ("FB", "FIW"):
                had = ", ".join(f"{stage}{kind}{microbatch}" for kind in kinds) or "nothing"
                raise _wrong(f"of stage {stage}, microbatch {microbatch} it has {had}, not F and B, or F, I and W")


def _wrong(message: str) -> MeshwrightError:
    action = "see 'meshwright schedule NAME --json' for the rows of a whole one"
    return error("E0506", f"the table of the schedule: {message}", action=action)
