"""Finds by runs which dims of what a model returns are its rows and positions."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from meshwright.compiler.causality.analysing import sizes
from meshwright.compiler.causality.edits import Base, Edit, base_values, edited
from meshwright.compiler.causality.feed import Feed, Layout
from meshwright.compiler.causality.outputs import layouts_of, named_tensors
from meshwright.compiler.causality.resizing import resized
from meshwright.compiler.causality.running import Subject


def with_layouts(subject: Subject, given: Feed) -> Feed:
    """The feed with the outputs whose dims follow rows and positions, by runs at two lengths.

    As it was if the model takes one length alone.
    """
    subject.draw(0.0, 1.0, 0)
    met: list[tuple[int, int, dict[str, tuple[int, ...]]]] = []
    for rows, length in sizes(given):
        if length not in {n for _, n, _ in met}:
            met += _shapes(subject, given, rows, length)
        if len(met) == 2:
            break
    if len(met) < 2:
        return given
    if given.batch_dim is not None:
        met += _shapes(subject, given, met[0][0] + 1, met[0][1])
    layouts = layouts_of(met, given)
    for name, layout in layouts.items():
        if layout.batch == layout.time and not _row_major(subject, given, name, layout, met[0][:2]):
            layouts[name] = replace(layout, row_major=not layout.row_major)
    return replace(given, layouts=layouts)


def _shapes(subject: Subject, given: Feed, rows: int, length: int) -> list[tuple[int, int, dict[str, tuple[int, ...]]]]:
    wide = subject.wide
    for subject.wide in dict.fromkeys((wide, False)):
        with contextlib.suppress(Exception):  # a size that cannot be made, or that the model refuses
            feed = resized(given, rows, length, {}, seed=length)
            returned = subject.call(feed, [leaf.value for leaf in feed.leaves])
            subject.wide = wide
            return [(rows, length, {name: tuple(v.shape) for name, v in named_tensors(returned)})]
    subject.wide = wide
    return []


def _row_major(subject: Subject, given: Feed, name: str, layout: Layout, size: tuple[int, int]) -> bool:
    """Whether the last token of the first row changes what the layout says is its output."""
    try:
        feed = replace(resized(given, *size, {}, 1), layouts={name: layout})
        values = base_values(feed, Base("random"), {}, 1)
        changed = edited(feed, values, Edit(0, (feed.length - 1,), "random"), {}, 2)
        one, other = subject.run(feed, values), subject.run(feed, changed)
    except Exception:  # whatever the user's model raises
        return True
    return not one.outputs or bool((one.outputs[0][0, -1] != other.outputs[0][0, -1]).any())
