"""From a plan to the layout of every parameter, of its gradient and of its optimizer state."""

from __future__ import annotations

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.compiler.graph.program import Parameter, StepProgram
from meshwright.compiler.graph.rank_program import Layout
from meshwright.compiler.mesh import MICRO, Dim, Mesh, Segment, Sharding
from meshwright.compiler.plan import ParameterPlan, Plan, pattern_expression


def layouts(program: StepProgram, plan: Plan) -> dict[str, Layout]:
    """The layout of every parameter.

    Raises E0303 for a pattern that fits none, E0304 for a sharding of another shape.
    """
    for entry in plan.parameters:
        if not any(_matches(entry, p) for p in program.parameters):
            names = [n for p in program.parameters for n in (p.name, *p.aliases)]
            raise error("E0303", f"no parameter matches '{entry.pattern}'", None, suggestion(entry.pattern, names))
    return {p.name: _layout(p, plan) for p in program.parameters}


def _matches(entry: ParameterPlan, parameter: Parameter) -> bool:
    expression = pattern_expression(entry.pattern)
    return any(expression.fullmatch(name) for name in (parameter.name, *parameter.aliases))


def _layout(parameter: Parameter, plan: Plan) -> Layout:
    shape = parameter.spec.shape
    entry = next((e for e in plan.parameters if _matches(e, parameter)), None)
    compute = entry.compute if entry is not None else Sharding.whole(shape)
    for sharding in (compute, *((entry.rest, entry.gradient, entry.state) if entry else ())):
        if sharding is not None and sharding.shape != shape:
            raise error(
                "E0304",
                f"'{parameter.name}' has shape {list(shape)}, but the plan cuts one of shape {list(sharding.shape)}",
                None,
                f"write the sharding of '{entry.pattern if entry else ''}' for shape {list(shape)}",
            )
    storage = plan.storage
    return Layout(
        rest=(entry.rest if entry else None) or store(compute, storage.parameters, plan.mesh),
        compute=compute,
        gradient=(entry.gradient if entry else None) or store(compute, storage.gradients, plan.mesh),
        state=(entry.state if entry else None) or store(compute, storage.state, plan.mesh),
    )


def store(sharding: Sharding, axes: tuple[str, ...], mesh: Mesh) -> Sharding:
    """The sharding cut further by the storage axes: along the first segment that divides (gathering along
    the first dim copies nothing), else along the longest one, with padding. A tensor whose dims are all
    shorter than the number of ranks stays as it is."""
    axes = tuple(a for a in axes if a not in sharding.axes)
    count = mesh.size(*axes)
    candidates = [(s.local(mesh), d, i) for d, i, s in sharding.segments() if s.local(mesh) >= count]
    if count == 1 or not candidates:
        return sharding
    even = [c for c in candidates if c[0] % count == 0]
    _, d, i = even[0] if even else max(candidates)
    dims = list(sharding.dims)
    part: list[Segment] = list(dims[d])
    part[i] = Segment(part[i].size, part[i].axes + axes)
    dims[d] = tuple(part)
    return Sharding(tuple(dims))


def batch_sharding(shape: tuple[int, ...], dim: int | None, plan: Plan, *, micro: bool) -> Sharding:
    """How a batch tensor lies: the batch dim is cut into microbatches first, then over the batch axes.

    ``micro``: as the micro graph sees it, one microbatch at a time. Otherwise as a rank holds it for
    the whole step: its rows of every microbatch.
    """
    if dim is None:
        return Sharding.whole(shape)
    size = shape[dim]
    each = size // plan.microbatches
    cut: Dim
    if micro:
        cut = (Segment(plan.microbatches, (MICRO,)), Segment(each, plan.batch))
    else:
        cut = (Segment(plan.microbatches), Segment(each, plan.batch))
    if plan.microbatches == 1:
        cut = (Segment(each, plan.batch),)
    return Sharding(tuple(cut if d == dim else (Segment(n),) for d, n in enumerate(shape)))


def check_plan(program: StepProgram, plan: Plan) -> None:
    """Refuse what no program can be compiled for: axes that are not in the mesh, a batch that is too small."""
    mesh = plan.mesh
    used = {
        "the batch": plan.batch,
        "storage": plan.storage.parameters + plan.storage.gradients + plan.storage.state,
        "sequence sharding": plan.sequence,
    }
    for what, axes in used.items():
        for axis in axes:
            if axis not in mesh.names:
                raise error(
                    "E0301",
                    f"{what} is cut by '{axis}', which is not an axis of the mesh ({mesh})",
                    None,
                    suggestion(axis, mesh.names),
                )
    size = program.batch_size
    if plan.microbatches < 1 or size % plan.microbatches:
        legal = [n for n in range(1, size + 1) if size % n == 0]
        raise error(
            "E0302",
            f"a batch of {size} samples cannot be cut into {plan.microbatches} microbatches",
            None,
            f"use one of {legal}",
        )
    each, ranks = size // plan.microbatches, mesh.size(*plan.batch)
    if each < ranks:
        raise error(
            "E0302",
            f"a microbatch of {each} samples cannot be cut over {ranks} ranks ({', '.join(plan.batch)})",
            None,
            f"use at most {size // ranks} microbatches" if size >= ranks else f"use a global batch of at least {ranks}",
        )
