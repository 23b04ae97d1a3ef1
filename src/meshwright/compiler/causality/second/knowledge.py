"""What a reading knows: of each tensor what it sees, which memory is whose, and why nothing can be said, if so.

The readers of several ranks, of which one computes at a time, share what they know.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.compiler.causality.second.seen import Seen, blank


@dataclass(eq=False)
class Knowledge:
    """``weights``: addresses of storages that hold weights, which mask nothing."""

    weights: set[int] = field(default_factory=set)
    stopped: str = ""
    """Why nothing can be said, if so."""
    finite: bool = False
    """Whether a mask of finite numbers was relied on, which masks nothing in a row that is masked entirely."""
    others: bool = False
    """Whether there are such masks that nothing is known of."""
    _known: Any = field(default_factory=WeakTensorKeyDictionary)
    _written: dict[int, int] = field(default_factory=dict)
    _telling: set[int] = field(default_factory=set)
    """Storages that hold something of tokens."""

    def stop(self, why: str) -> None:
        """Nothing can be said any more; the first reason counts."""
        self.stopped = self.stopped or why

    def seen(self, value: Tensor) -> Seen:
        """What is known of a tensor."""
        found = self._known.get(value)
        if found is None:
            if address(value) in self._telling:
                self.stop("memory is read by way of a tensor that no op has made")
            return blank(value.shape)
        made, epoch = found
        if epoch != self._written.get(address(value), 0):
            self.stop("a tensor was written by way of another view of it")
        result: Seen = made
        return result

    def know(self, value: Tensor, seen: Seen) -> None:
        """Set what is known of a tensor."""
        self._known[value] = (seen, self._written.get(address(value), 0))
        if seen.depends:
            _while_it_lasts(self._telling, value)

    def wrote(self, value: Tensor, seen: Seen) -> None:
        """A tensor was written into: what was known of its views is over."""
        self._written[address(value)] = self._written.get(address(value), 0) + 1
        self.know(value, seen)

    def are_weights(self, values: Iterable[Tensor]) -> bool:
        """Whether all of these are weights, or made of them by moves alone."""
        addresses = [address(value) for value in values]
        return bool(addresses) and all(one in self.weights for one in addresses)

    def moved_weight(self, value: Tensor) -> None:
        """A tensor holds what weights held elsewhere."""
        _while_it_lasts(self.weights, value)


def address(value: Tensor) -> int:
    """Of a tensor's memory."""
    return value.untyped_storage().data_ptr()


def _while_it_lasts(addresses: set[int], value: Tensor) -> None:
    """Note an address for as long as its memory is there, for another tensor may lie there afterwards."""
    here = address(value)
    if here not in addresses:
        addresses.add(here)
        weakref.finalize(value.untyped_storage(), addresses.discard, here)
