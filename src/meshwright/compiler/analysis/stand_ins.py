"""Which captured blocks stand for which others, where a plan recomputes only some of the blocks of a model of which
only the first were captured.

What memory a step needs depends on the order: backward begins with the last blocks, so that what they recompute comes
on top of what all others have saved. Captured blocks therefore stand for: the first that recomputes, those that do not,
the last that recomputes, and those behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from meshwright.compiler.analysis.level import Group, Unknown
from meshwright.compiler.plan import Save

COPIES = 4
"""So many blocks of each kind must be captured."""
Role = tuple[Save, str]


def stand_ins(groups: Sequence[Group], absent: Collection[str], saves: Mapping[str, Save]) -> dict[str, Role]:
    """By block, what it keeps for backward and a word for its place; as many of each as ``saves``, the treatments of
    the whole step, ask for. Raises Unknown if too few blocks of a kind were captured."""
    found: dict[str, Role] = {}
    for group in groups:
        if not any(name in absent for name in group.blocks):
            found |= {name: (saves[name], name) for name in group.blocks if name in saves}
            continue
        treated = [name for name in group.blocks if name in saves]
        roles = _roles([saves[name] for name in treated])
        present = _present(roles, sum(name not in absent for name in treated))
        for role in present:
            roles.remove(role)
        found |= dict(zip(treated, (*present, *roles), strict=True))
    return found


def _roles(saves: Sequence[Save]) -> list[Role]:
    """Of blocks from the first to the last."""
    last = max((i for i, save in enumerate(saves) if save != "all"), default=-1)
    return [(save, "behind" if save == "all" and 0 <= last < i else "") for i, save in enumerate(saves)]


def _present(roles: Sequence[Role], count: int) -> list[Role]:
    """The roles of the blocks that were captured, in order."""
    kinds = list(dict.fromkeys(roles))
    if len(kinds) == 1:
        return [kinds[0]] * count
    recomputed = [role for role in roles if role[0] != "all"]
    behind = [role for role in roles if role[1]]
    kept = [role for role in roles if role[0] == "all" and not role[1]]
    first, last, end = recomputed[:1], recomputed[1:][-1:], behind[:1]
    middle = kept[: count - len(first) - len(last) - len(end)]
    more = behind[1 : 1 + count - len(first) - len(middle) - len(last) - len(end)]
    found = [*first, *middle, *last, *end, *more]
    if len(found) != count or not set(kinds) <= set(found):
        raise Unknown("too few blocks were captured for a plan that treats them in turns")
    return found
