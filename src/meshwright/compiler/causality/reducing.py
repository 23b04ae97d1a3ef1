"""Makes a leak that was found as small as it can be told: the weights as given, one token changed."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from meshwright.compiler.causality.cases import Case, apart_in
from meshwright.compiler.causality.comparing import first_far
from meshwright.compiler.causality.edits import row_of
from meshwright.compiler.causality.feed import Role
from meshwright.compiler.causality.search import Search


def smallest(search: Search, case: Case) -> Case:
    """The same leak by a change of one token, if there is such a one."""
    search.subject.draw(*case.weights)
    own = (0.0, 1.0, 0)
    if case.weights != own and (same := _again(search, replace(case, weights=own))) is not None:
        case = same
    places = [p for p in case.edit.positions if _forbidden(case, p)]
    for place in sorted(places)[:16] if len(places) > 1 else []:
        edit = replace(case.edit, positions=(place,))
        values = _only(case, place)
        made = _again(search, replace(case, edit=edit, values_b=values))
        if made is not None:
            return made
    return case


def _again(search: Search, case: Case) -> Case | None:
    if search.subject.clock.late:
        return None
    search.subject.draw(*case.weights)
    try:
        a, b = search.subject.run(case.feed, case.values_a), search.subject.run(case.feed, case.values_b)
    except Exception:  # whatever the user's model raises with these weights
        return None
    offset = a.offsets[case.which]
    worst = apart_in(case, a, b)
    most = float(worst.max()) if worst.numel() else 0.0
    if most <= (1e-7 if search.subject.wide else search.narrow_bound if case.kind not in search.keen else 0):
        return None
    place = first_far(worst)
    return replace(case, output=(place[0], place[1] - offset), difference=most)


def _forbidden(case: Case, place: int) -> bool:
    if case.kind == "batch":
        return True
    row, time_at = case.output
    if case.kind == "future":
        return place > time_at
    assert case.feed.segments is not None
    return bool(case.feed.segments[row, place] != case.feed.segments[row, time_at])


def _only(case: Case, place: int) -> list[Tensor]:
    made = []
    for leaf, a, b in zip(case.feed.leaves, case.values_a, case.values_b, strict=True):
        if leaf.role is Role.TOKENS:
            value = a.clone()
            row_of(value, case.feed, case.edit.row)[place] = row_of(b, case.feed, case.edit.row)[place]
            made.append(value)
        else:
            made.append(a)
    return made
