"""A prefix alone against the same positions of the whole: constants that depend on the length of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.clock import OVER, TimeIsUp
from meshwright.compiler.causality.feed import Feed, Role, Unfit, call_with
from meshwright.compiler.causality.outputs import token_outputs
from meshwright.compiler.diagnostics import Diagnostic
from meshwright.compiler.drift.cached import of_tokens
from meshwright.compiler.drift.partial import onset
from meshwright.compiler.drift.recorder import BUDGET
from meshwright.compiler.drift.running import Ran, Stand
from meshwright.compiler.drift.verdict import TOLERANCE


@dataclass(frozen=True)
class Compared:
    """The largest difference; None if it was not compared."""

    error: float | None
    findings: tuple[Diagnostic, ...] = ()
    skipped: tuple[str, ...] = ()


def compare_lengths(stand: Stand, feed: Feed) -> Compared:
    """Compare. Nothing that the model raises leaves it."""
    short = feed.length // 2
    if short < 1 or feed.batch_dim != 0 or feed.time_dim != 1:
        return Compared(None, (), ("lengths: the batch is not of rows and two or more positions",))
    try:
        whole = _run(stand, feed, BUDGET)
        part = _run(stand, prefix_of(feed, short), BUDGET)
        expected, got = _output(whole, feed)[:, :short], _output(part, replace(feed, length=short))
        if expected.shape != got.shape:
            return Compared(None, (), ("lengths: the outputs of a prefix have another shape",))
        error = relative(got, expected)
        if error <= TOLERANCE:
            return Compared(error)
        other = _run(stand, _later_changed(feed, short), 0)
        if relative(_output(other, feed)[:, :short], expected) > TOLERANCE:
            return Compared(None, (), ("lengths: outputs depend on later tokens, and so on how many there are",))
    except TimeIsUp:
        return Compared(None, (), (f"lengths: {OVER}",))
    except Exception as fault:  # whatever the user's model raises
        told = str(fault).strip().splitlines()[0][:160] if str(fault).strip() else ""
        return Compared(None, (), (f"lengths: a prefix cannot be run alone: {type(fault).__name__}: {told}",))
    found = onset(whole.trace, feed.length, part.trace, 0, short)
    notes = [
        f"positions 0 to {short - 1} differ by {error:.1e} of the largest output between lengths {short} and "
        f"{feed.length}, though they see the same tokens"
    ]
    if found is not None:
        notes.append(f"first differs in {found.step.op} of module '{found.step.module}'")
        if found.constant is not None:
            notes.append(
                f"given a constant: {found.constant[1]} at length {short}, {found.constant[0]} at {feed.length}"
            )
    message = "outputs depend on the length of the batch, by a constant that is made of it"
    action = "make the constant of positions or of the configuration, not of the length at hand"
    diagnostic = Diagnostic("E0776", message, found.step.place if found else None, action, tuple(notes))
    return Compared(error, (diagnostic,))


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest element, of finite ones; infinite where one side alone is."""
    fine = torch.isfinite(b)
    if not torch.equal(fine, torch.isfinite(a)):
        return float("inf")
    size = float(torch.where(fine, b, 0.0).abs().max()) or 1.0
    return float(torch.where(fine, a - b, 0.0).abs().max()) / size


def prefix_of(feed: Feed, length: int) -> Feed:
    """The first positions of all inputs. Raises Unfit where an input says otherwise."""
    values = []
    for leaf in feed.leaves:
        value = leaf.value
        for dim in range(1, value.dim()):
            cut = of_tokens(leaf, feed) and (dim == feed.time_dim or leaf.role is Role.GIVEN)
            if cut and value.shape[dim] == feed.length:
                value = value.narrow(dim, 0, length)
        values.append(value)
    return feed.with_values(values, feed.rows, length, None)


def _later_changed(feed: Feed, start: int) -> Feed:
    """Other tokens from a position on: those that are there, in the order of another row or turned round."""
    values = []
    for leaf in feed.leaves:
        value = leaf.value
        if leaf.role is Role.TOKENS:
            later = value.narrow(feed.time_dim, start, feed.length - start)
            turned = torch.cat([later.roll(1, 0) if feed.rows > 1 else later, later], 1).flip(1)
            turned = turned.narrow(1, 1, feed.length - start)
            value = torch.cat([value.narrow(feed.time_dim, 0, start), turned], feed.time_dim)
        values.append(value)
    return feed.with_values(values, feed.rows, feed.length, None)


def _run(stand: Stand, feed: Feed, budget: int) -> Ran:
    values = stand.inputs([leaf.value for leaf in feed.leaves], True)

    def call(function: Callable[..., Any]) -> Any:
        return call_with(function, feed.filled(values))

    def outputs(returned: Any) -> list[Tensor]:
        return [o.value for o in token_outputs(returned, feed)]

    return stand.run(call, values, outputs, training=False, wide=True, budget=budget)


def _output(ran: Ran, feed: Feed) -> Tensor:
    found = token_outputs(ran.returned, feed)
    if not found:
        raise Unfit("nothing that the model returns has the positions of its input")
    return found[0].value
