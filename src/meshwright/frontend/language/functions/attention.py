"""`attend` and `rope`: attention over a named time axis, with grouped key and value heads."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.compiler.diagnostics import error
from meshwright.frontend.language import tree
from meshwright.frontend.language.functions.invocation import Invocation, builtin
from meshwright.frontend.language.term import Term, reorder

_EXAMPLE = "attend(q, k, v, causal over t)"


@dataclass(frozen=True)
class _Roles:
    """What each axis of a query or key is."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    time: str
    channel: str

    @property
    def order(self) -> tuple[str, ...]:
        return (*self.batch, *self.heads, self.time, self.channel)


@builtin("attend", 3, 4, keywords=("scale", "window", "dropout"))
def attend(call: Invocation) -> Term:
    """``attend(q, k, v, causal over t)`` or ``attend(q, k, v over t)``.

    The last axis of each is its channels; the axis after ``over`` is time; what else they have is batch and heads.
    Fewer key and value heads than query heads are shared by groups of neighbouring query heads.
    """
    call.no_over(0, 1)
    causal = len(call.positional) == 4
    if causal:
        _check_causal(call, call.positional[3])
    q, k, v = (call.tensor(i) for i in range(3))
    time = call.axis(3 if causal else 2, q, _EXAMPLE)
    query = _roles(call, q, time, 0)
    key = _roles(call, k, _key_time(k, q, time), 1)
    value = _roles(call, v, key.time, 2)
    _check_heads(call, query, key, value, (q, k, v))
    order = query.order
    lifted = "" if query.heads else ".unsqueeze(1)"
    codes = [reorder(term, roles.order).code + lifted for term, roles in ((q, query), (k, key), (v, value))]
    options = [f"causal={causal}"]
    if "window" in call.keywords:
        options.append(f"window={_window(call, causal)}")
    if "scale" in call.keywords:
        options.append(f"scale={call.floating('scale', 1.0)!r}")
    if "dropout" in call.keywords:
        options.append(f"dropout={_probability(call, 'dropout')!r} if self.training else 0.0")
    code = f"operations.attend({', '.join(codes + options)})" + (".squeeze(1)" if lifted else "")
    result = Term((*order[:-1], value.channel), code, call.span)
    return reorder(result, tuple(value.channel if axis == query.channel else axis for axis in q.axes))


def _check_causal(call: Invocation, argument: tree.Argument) -> None:
    call.no_over(2)
    if not (isinstance(argument.value, tree.Name) and argument.value.name == "causal"):
        raise error(
            "E0211", "the fourth argument of 'attend' can only be 'causal'", argument.span, f"write '{_EXAMPLE}'"
        )


def _key_time(k: Term, q: Term, time: str) -> str:
    """The time axis of the key: the query's, or else the one before the channels."""
    return time if time in k.axes or len(k.axes) < 2 else k.axes[-2]


def _roles(call: Invocation, term: Term, time: str, index: int) -> _Roles:
    channel = term.axes[-1]
    if time not in term.axes or channel == time:
        problem = f"has no time axis '{time}'" if time not in term.axes else f"ends in the time axis '{time}'"
        raise error(
            "E0208",
            f"{term.named()} {problem}",
            call.positional[index].span,
            "give it the axes [batch heads time channels]",
        )
    rest = [axis for axis in term.axes[:-1] if axis != time]
    batch = tuple(axis for axis in rest if axis == call.dimensions.batch)
    heads = tuple(axis for axis in rest if axis not in batch)
    if len(heads) > 1 or not batch:
        raise error(
            "E0208",
            f"'attend' cannot read {term.named()} as batch, heads, time and channels",
            call.positional[index].span,
            "give it the axes [batch heads time channels]",
        )
    return _Roles(batch, heads, time, channel)


def _check_heads(call: Invocation, query: _Roles, key: _Roles, value: _Roles, terms: tuple[Term, ...]) -> None:
    sizes = call.dimensions.sizes
    if key.channel != query.channel:
        message = f"query {terms[0].named()} and key {terms[1].named()} end in different channel axes"
        raise error("E0209", message, call.positional[1].span, f"give the key '{query.channel}' as its last axis")
    if key.heads != value.heads or bool(query.heads) != bool(key.heads):
        message = (
            f"key {terms[1].named()} and value {terms[2].named()} must have the same head axis, and the query one too"
        )
        raise error("E0209", message, call.positional[2].span, "give key and value the same head axis")
    if query.heads and sizes[query.heads[0]] % sizes[key.heads[0]]:
        q, k = query.heads[0], key.heads[0]
        message = f"{sizes[q]} query heads '{q}' cannot share {sizes[k]} key heads '{k}' evenly"
        raise error("E0209", message, call.positional[1].span, f"make the size of '{q}' a multiple of '{k}'")


def _window(call: Invocation, causal: bool) -> int:
    value = call.floating("window", 0)
    if value < 1 or value != int(value) or not causal:
        problem = "needs 'causal'" if not causal else f"is {value:g}"
        raise error(
            "E0211", f"'window' {problem}", call.keywords["window"].span, f"write '{_EXAMPLE[:-1]}, window = 64)'"
        )
    return int(value)


def _probability(call: Invocation, keyword: str) -> float:
    value = call.floating(keyword, 0.0)
    if not 0 <= value < 1:
        raise error("E0211", f"'{keyword}' is {value:g}", call.keywords[keyword].span, "write a number from 0 up to 1")
    return value


@builtin("rope", 1, keywords=("theta",))
def rope(call: Invocation) -> Term:
    """``rope(q over t, theta = 10000)``: turn the channels (the last axis) by an angle that grows with position.

    Channel ``i`` is paired with ``i + c/2``, as in the published Llama weights of `transformers`.
    """
    term = call.tensor(0)
    time = call.axis(0, term, "rope(q over t)")
    channel = term.axes[-1]
    size = call.dimensions.sizes.get(channel, 0)
    if channel == time or size % 2:
        problem = "is the time axis itself" if channel == time else f"has the odd size {size}"
        raise error(
            "E0209",
            f"the last axis '{channel}' {problem}, but 'rope' turns pairs of it",
            call.span,
            "make its size even",
        )
    order = (*(axis for axis in term.axes if axis not in (time, channel)), time, channel)
    code = f"operations.rope({reorder(term, order).code}, {call.floating('theta', 10000.0)!r})"
    return reorder(Term(order, code, call.span), term.axes)
