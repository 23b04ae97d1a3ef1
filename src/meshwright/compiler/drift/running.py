"""Runs of one model that know nothing of each other: in a mode, in its own dtypes or in float64, seen op by op."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.compiler.causality.clock import Clock
from meshwright.compiler.causality.places import user_place
from meshwright.compiler.causality.running import Subject, subject_of
from meshwright.compiler.causality.widening import Widen, widened
from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.drift.recorder import Recorder, Where
from meshwright.compiler.drift.step import Trace

_DROPS = frozenset((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout))
_ATTENTIONS = frozenset((F.scaled_dot_product_attention, F.multi_head_attention_forward))


class WithoutDropout(TorchFunctionMode):
    """Dropout drops nothing: what is left of training is what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[Origin] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _DROPS:
            self.met.append(user_place())
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention and (len(args) > 4 or kwargs.get("dropout_p")):
            args, kwargs["dropout_p"] = args[:4], 0.0
        if function is F.multi_head_attention_forward and "training" in kwargs:
            kwargs["training"] = False
        return function(*args, **kwargs)


@dataclass(frozen=True)
class Ran:
    """What a run returned, and its ops."""

    returned: Any
    trace: Trace


@dataclass
class Stand:
    """A model between runs. Each run finds it as it was given: weights, buffers, attributes."""

    subject: Subject
    attributes: list[tuple[nn.Module, dict[str, Any]]]
    training: list[tuple[nn.Module, bool]]

    def run(
        self,
        call: Callable[[Callable[..., Any]], Any],
        variables: list[Tensor],
        outputs: Callable[[Any], list[Tensor]],
        *,
        training: bool,
        wide: bool,
        budget: int = 0,
        around: Callable[[Where], contextlib.AbstractContextManager[Any]] | None = None,
        least: bool = False,
        seed: int = 0,
    ) -> Ran:
        """One run. ``call`` is given the model; ``outputs`` says what counts of that which it returns. ``least``: a
        run without which nothing can be said; ``seed``: that of what the model draws by chance.

        Raises what the model raises, and TimeIsUp if it is too late for a run.
        """
        with self.as_given(training, wide, seed):
            return self.go(
                call, variables, outputs, training=training, wide=wide, budget=budget, around=around, least=least
            )

    def go(
        self,
        call: Callable[[Callable[..., Any]], Any],
        variables: list[Tensor],
        outputs: Callable[[Any], list[Tensor]],
        *,
        training: bool,
        wide: bool,
        budget: int = 0,
        around: Callable[[Where], contextlib.AbstractContextManager[Any]] | None = None,
        least: bool = False,
    ) -> Ran:
        """One call among several in :meth:`as_given`, which may keep state from one to the next."""
        where = Where()
        handles = where.follow(self.subject.modules)
        recorder = Recorder(where, [*self.subject.parameters, *variables], self.subject.buffers, budget)
        without = WithoutDropout() if training else None
        try:
            with contextlib.ExitStack() as stack:
                if wide:
                    stack.enter_context(Widen())  # type: ignore[no-untyped-call]  # torch leaves it without types
                if without is not None:
                    stack.enter_context(without)
                stack.enter_context(self.subject.clock.run("drift: the model, on the batch as given", least=least))
                stack.enter_context(recorder if around is None else around(where))
                returned = call(self.subject.function)
            trace = recorder.end(outputs(returned))
        finally:
            for handle in handles:
                handle.remove()
        if without is not None:
            trace.drops.extend(without.met)
        return Ran(returned, trace)

    @contextlib.contextmanager
    def as_given(self, training: bool, wide: bool, seed: int = 0) -> Iterator[None]:
        """The model as it was given, in a mode; float64 is also what new tensors are made in, if ``wide``."""
        default = torch.get_default_dtype()
        self.subject.place(wide)
        kept = [(m, {k: _shallow(v) for k, v in values.items()}) for m, values in self.attributes]
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.manual_seed(seed)
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(torch.set_grad_enabled(training))
                for module in self.subject.modules:
                    module.train(training)
                for module, _ in self.attributes:
                    if training and isinstance(module, nn.RNNBase):
                        module.dropout = 0.0  # it drops within one op; put back with the other attributes
                if wide:
                    torch.set_default_dtype(torch.float64)
                yield
        finally:
            torch.set_default_dtype(default)
            for module, values in kept:
                module.__dict__.clear()
                module.__dict__.update(values)
            for module, mode in self.training:
                module.training = mode

    def inputs(self, values: list[Tensor], wide: bool) -> list[Tensor]:
        """Copies of the inputs, in float64 if ``wide``."""
        return [widened(v.clone()) if wide else v.clone() for v in values]


@contextlib.contextmanager
def standing(model: Callable[..., Any], clock: Clock) -> Iterator[Stand]:
    """A model to be run; afterwards it is as it was, also where it could not be copied. Raises Unfit for none."""
    subject = subject_of(model)
    subject.clock = clock
    subject.draw(0.0, 1.0, 0)
    all_modules = [m for root in subject.modules for m in root.modules()]
    stand = Stand(
        subject,
        [(m, {k: _shallow(v) for k, v in m.__dict__.items()}) for m in all_modules],
        [(m, m.training) for m in all_modules],
    )
    with subject.restored():
        yield stand


def _shallow(value: Any) -> Any:
    """Containers copied, so that what a run adds to them is gone afterwards."""
    return type(value)(value) if type(value) in (dict, list, set) else value
