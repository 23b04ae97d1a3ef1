"""The schedules there are: the modules of this folder that have a ``NAME`` and a function ``schedule``."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.compiler.schedules import __path__ as folder
from meshwright.compiler.schedules.request import Costs, Request
from meshwright.compiler.schedules.rounds import lets_meet
from meshwright.compiler.schedules.simulate import Stuck
from meshwright.compiler.schedules.table import Schedule


@cache
def modules() -> dict[str, ModuleType]:
    """By name."""
    found = (importlib.import_module(f"meshwright.compiler.schedules.{m.name}") for m in pkgutil.iter_modules(folder))
    return dict(sorted((m.NAME, m) for m in found if hasattr(m, "NAME")))


def request_for(
    name: str, stages: int, microbatches: int, virtual: int | None, costs: Costs, memory: float | None = None
) -> Request:
    """What to ask of a schedule for so many stages; ``virtual`` of them on each rank, by default as many as it is made
    for. Raises MeshwrightError E0501 for an unknown name, E0502 where the stages do not fill the ranks, E0503 for costs
    that are none."""
    each = _module(name).VIRTUAL if virtual is None else virtual
    if stages % each:
        more = -(-stages // each) * each
        exact = getattr(_module(name), "EXACT", False)
        raise error(
            "E0502",
            f"{stages} stages are not {each} on each rank",
            action=f"give --stages {more}" + ("" if exact else f", or --virtual with a divisor of {stages}"),
        )
    if memory is not None and not searched(name):
        raise error(
            "E0502", f"the schedule {name} holds what it holds, whatever the memory", action="take 'list' with --memory"
        )
    values = (costs.forward, costs.input, costs.weight, costs.send)
    if not math.isfinite(sum(values) * stages * microbatches) or sum(values[:3]) <= 0:
        raise error("E0503", "passes that take no time, or never end", action="give times above 0")
    return Request(stages // each, microbatches, each, costs, memory)


def virtual(name: str) -> int:
    """How many stages a schedule is made to put on each rank. Raises MeshwrightError E0501 for an unknown name."""
    made_for: int = _module(name).VIRTUAL
    return made_for


def own_name(name: str) -> str:
    """The name as the schedule itself has it. Raises MeshwrightError E0501 for an unknown name."""
    own: str = _module(name).NAME
    return own


def searched(name: str) -> bool:
    """Whether a schedule is made by comparing others. Raises MeshwrightError E0501 for an unknown name."""
    return bool(getattr(_module(name), "SEARCHED", False))


def why_not(name: str, request: Request) -> str:
    """Why a schedule cannot serve a request; empty if it can."""
    module = _module(name)
    if getattr(module, "EXACT", False) and request.virtual != module.VIRTUAL:
        return f"has {_stages(module.VIRTUAL)} on each rank, not {request.virtual}"
    if getattr(module, "EVEN", False) and request.ranks % 2:
        return f"needs an even number of ranks, not {request.ranks}"
    return ""


def may_meet(name: str, request: Request) -> bool:
    """Whether a schedule lets all microbatches meet at every stage."""
    return not searched(name) and lets_meet(make(name, request))


def meeting_schedule(several: bool) -> str:
    """The schedule of a pipeline in which microbatches meet, if none is said; ``several`` stages on each rank."""
    return "breadth-first" if several else "gpipe"


def make(name: str, request: Request) -> Schedule:
    """The schedule of a name. Raises MeshwrightError E0501 for an unknown one, E0502 for a request that it cannot
    serve, E0504 where memory is too little for any."""
    module = _module(name)
    why = why_not(name, request)
    if why:
        others = ", ".join(other for other in modules() if not why_not(other, request))
        raise error("E0502", f"the schedule {module.NAME} {why}", action=f"change that, or take one of {others}")
    try:
        result: Schedule = module.schedule(request)
    except Stuck:
        raise error(
            "E0504",
            f"no schedule keeps to {request.memory:g} activations on each rank",
            action=f"allow at least {request.virtual * request.ranks}",
        ) from None
    return result


def named(request: Request) -> Iterator[Schedule]:
    """All schedules but the one that is searched for, as far as they can serve."""
    for name, module in modules().items():
        if not searched(name) and not why_not(name, request):
            yield module.schedule(request)


def _module(name: str) -> ModuleType:
    known = modules()
    module = known.get(name.strip().lower())
    if module is None:
        raise error("E0501", f"there is no schedule '{name}'", action=suggestion(name, known))
    return module


def _stages(count: int) -> str:
    return "one stage" if count == 1 else f"{count} stages"
