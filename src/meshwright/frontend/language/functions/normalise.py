"""`norm`, `rms_norm` and `softmax`: functions that need an axis whole."""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.diagnostics import error
from meshwright.frontend.language.functions.invocation import Invocation, builtin
from meshwright.frontend.language.term import Term, reorder


def _last(term: Term, axes: tuple[str, ...]) -> Term:
    """The term with ``axes`` as its last dims."""
    return reorder(term, tuple(axis for axis in term.axes if axis not in axes) + axes)


def _scales(call: Invocation, axes: tuple[str, ...], *keywords: str) -> str:
    """The parameters given by keyword, as further arguments of the function; each has exactly ``axes``."""
    codes = []
    for keyword in keywords:
        term = call.tensor_keyword(keyword)
        if term is not None and set(term.axes) != set(axes):
            raise error(
                "E0208",
                f"'{keyword}' has axes {term.named()}, but the norm is over [{' '.join(axes)}]",
                call.keywords[keyword].span,
                f"declare it as 'param {keyword}[{' '.join(axes)}]'",
            )
        codes.append("None" if term is None else reorder(term, axes).code)
    return ", ".join(codes)


@builtin("norm", 1, keywords=("weight", "bias", "eps"))
def norm(call: Invocation) -> Term:
    """LayerNorm over the axes named: zero mean, unit variance, then ``weight`` and ``bias`` where given."""
    term = call.tensor(0)
    axes = call.over(0, term, "norm(x over d)")
    moved = _last(term, axes)
    sizes = tuple(call.dimensions.sizes[axis] for axis in axes)
    scales = _scales(call, axes, "weight", "bias")
    code = f"F.layer_norm({moved.code}, {sizes}, {scales}, {call.floating('eps', 1e-5)!r})"
    return reorder(Term(moved.axes, code, call.span), term.axes)


@builtin("rms_norm", 1, keywords=("weight", "eps"))
def rms_norm(call: Invocation) -> Term:
    """Divide by the root of the mean square over the axes named, then times ``weight`` where given."""
    term = call.tensor(0)
    axes = call.over(0, term, "rms_norm(x over d)")
    moved = _last(term, axes)
    weight = _scales(call, axes, "weight")
    code = f"operations.rms_norm({moved.code}, {len(axes)}, {weight}, {call.floating('eps', 1e-5)!r})"
    return reorder(Term(moved.axes, code, call.span), term.axes)


@builtin("softmax", 1)
def softmax(call: Invocation) -> Term:
    """Softmax over one axis."""
    term = call.tensor(0)
    axis = call.axis(0, term, "softmax(x over s)")
    return replace(term, code=f"torch.softmax({term.code}, {term.axes.index(axis)})", span=call.span, weight=False)


def _reduction(name: str, call: Invocation) -> Term:
    term = call.tensor(0)
    axes = call.over(0, term, f"{name}(x over t)")
    dims = tuple(term.axes.index(axis) for axis in axes)
    kept = tuple(axis for axis in term.axes if axis not in axes)
    return Term(kept, f"torch.{name}({term.code}, {dims})", call.span, weight=term.weight)


total = builtin("sum", 1)(lambda call: _reduction("sum", call))
mean = builtin("mean", 1)(lambda call: _reduction("mean", call))
largest = builtin("amax", 1)(lambda call: _reduction("amax", call))
smallest = builtin("amin", 1)(lambda call: _reduction("amin", call))
