"""`cross_entropy` and `next`: what a language model is trained on."""

from __future__ import annotations

from meshwright.compiler.diagnostics import error
from meshwright.frontend.language.functions.invocation import Invocation, builtin
from meshwright.frontend.language.term import Term, reorder


@builtin("cross_entropy", 2, keywords=("label_smoothing",))
def cross_entropy(call: Invocation) -> Term:
    """``cross_entropy(logits over vocab, targets)``: the mean over all targets that are not -100."""
    call.no_over(1)
    logits, targets = call.tensor(0), call.integers(1)
    axis = call.axis(0, logits, "cross_entropy(logits over vocab, targets)")
    kept = tuple(name for name in logits.axes if name != axis)
    if set(kept) != set(targets.axes):
        raise error(
            "E0208",
            f"logits {logits.named()} without '{axis}' do not match the targets {targets.named()}",
            call.span,
            f"give the targets the axes [{' '.join(kept)}]",
        )
    moved, labels = reorder(logits, (*kept, axis)), reorder(targets, kept)
    smoothing = call.floating("label_smoothing", 0.0)
    extra = f", label_smoothing={smoothing!r}" if smoothing else ""
    flat = f"{moved.code}.flatten(0, {len(kept) - 1})" if len(kept) > 1 else moved.code
    return Term((), f"F.cross_entropy({flat}, {labels.code}.flatten(){extra})", call.span)


@builtin("next", 1)
def following(call: Invocation) -> Term:
    """``next(tokens over t)``: at each position the following token; the last position is not counted (-100)."""
    tokens = call.integers(0)
    axis = call.axis(0, tokens, "next(tokens over t)")
    order = (*(name for name in tokens.axes if name != axis), axis)
    code = f"operations.following({reorder(tokens, order).code})"
    return reorder(Term(order, code, call.span, integer=True), tokens.axes)
