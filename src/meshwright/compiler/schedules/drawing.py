"""A schedule as text and as a picture: ranks from top to bottom, time from left to right."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from meshwright.compiler.schedules.simulate import Run
from meshwright.compiler.schedules.table import Schedule, Step

COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}
MEANING = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
_WIDTH, _HEIGHT, _LEFT, _LEGEND = 1200, 28, 60, 28


def as_text(schedule: Schedule, run: Run) -> str:
    """One line for each rank, to scale; a dot is a moment in which it waits."""
    shortest = min((end - start for row in run.times for start, end in row if end > start), default=1.0)
    cell = max((len(_label(schedule, step)) for row in schedule.rows for step in row), default=1) + 1
    lines = []
    for rank, (row, times) in enumerate(zip(schedule.rows, run.times, strict=True)):
        line = ""
        for step, (start, end) in zip(row, times, strict=True):
            line = line.ljust(_column(start, shortest, cell), ".")
            width = max(cell, _column(end, shortest, cell) - len(line))
            line += _label(schedule, step).ljust(width)
        lines.append(f"rank {rank:<3} {line}".rstrip())
    return "\n".join(lines)


def _column(time: float, unit: float, cell: int) -> int:
    return round(time / unit) * cell


def _label(schedule: Schedule, step: Step) -> str:
    """Without the stage where a rank has one alone."""
    alone = len(schedule.placement) == 1 and schedule.stages == schedule.ranks
    return "+".join(f"{a.kind}{a.microbatch}" if alone else str(a) for a in step)


def as_svg(schedule: Schedule, run: Run) -> str:
    """A picture, as the text of an SVG file."""
    scale = (_WIDTH - _LEFT) / run.seconds
    size = {"width": str(_WIDTH + 10), "height": str(_HEIGHT * schedule.ranks + _LEGEND + 10)}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif", **size})
    ElementTree.SubElement(root, "title").text = f"{schedule.name}: {schedule.microbatches} microbatches"
    for rank, (row, times) in enumerate(zip(schedule.rows, run.times, strict=True)):
        top = rank * _HEIGHT + 5
        _text(root, 5, top + _HEIGHT * 0.65, f"rank {rank}", 12)
        for step, (start, end) in zip(row, times, strict=True):
            for place, action in enumerate(step):
                each = _HEIGHT / len(step)
                x, width = _LEFT + start * scale, (end - start) * scale
                box = {"x": x, "y": top + place * each, "width": width, "height": each - 1}
                attributes = {name: f"{value:.2f}" for name, value in box.items()}
                rectangle = ElementTree.SubElement(root, "rect", {**attributes, "fill": COLOURS[action.kind]})
                ElementTree.SubElement(rectangle, "title").text = f"{action}: {start:g} to {end:g}"
                label = _label(schedule, (action,))
                if width > 6 * len(label):
                    _text(root, x + 2, top + place * each + each * 0.65, label, 10)
    _legend(root, schedule)
    return ElementTree.tostring(root, encoding="unicode")


def _legend(root: ElementTree.Element, schedule: Schedule) -> None:
    left, top = float(_LEFT), schedule.ranks * _HEIGHT + 12
    for kind in _kinds(schedule):
        box = {"x": f"{left:.0f}", "y": str(top), "width": "14", "height": "14", "fill": COLOURS[kind]}
        ElementTree.SubElement(root, "rect", box)
        _text(root, left + 18, top + 11, MEANING[kind], 11)
        left += 40 + 7 * len(MEANING[kind])


def _kinds(schedule: Schedule) -> Iterator[str]:
    used = {a.kind for rank in range(schedule.ranks) for a in schedule.actions(rank)}
    return (kind for kind in COLOURS if kind in used)


def _text(root: ElementTree.Element, x: float, y: float, text: str, size: int) -> None:
    ElementTree.SubElement(root, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "font-size": str(size)}).text = text
