"""Where shadows are kept: beside each element's place in memory.

A view has the shadow of what it views and a write through a view changes the shadow of the base, so no op that only
looks at memory otherwise, and none that writes in place, needs a rule of its own.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.shadow import Shadow, constant

_KNOWN, _UNKNOWN = torch.tensor(True), torch.tensor(False)


@dataclass
class _Cell:
    """The shadow of one storage, element by element of its memory."""

    unit: int
    known: Tensor
    deps: Tensor | None = None
    item: Tensor | None = None
    rank: Tensor | None = None
    trait: Tensor | None = None
    lent: bool = False
    """Whether somebody may hold a view of the fields: they are copied before they are written."""
    whole: tuple[tuple[Any, ...], Shadow] | None = None
    """The shadow of a tensor that fills the storage, by its layout, while it has not been laid out."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in its storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    itemsize: int

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def storage_offset(self) -> int:
        return self.offset


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.itemsize


_FIELDS = ("known", "deps", "item", "rank", "trait")
_DTYPES = {"known": torch.bool, "deps": torch.int64, "item": torch.int32, "rank": torch.int32, "trait": torch.uint8}


@dataclass
class Memory:
    """The shadows of all tensors of one run. ``width`` is the words of a set."""

    width: int
    weights: frozenset[int] = frozenset()
    """Addresses of storages that hold weights: never known, whatever is in them."""
    foreign: bool = False
    """Whether a tensor that is trained was met which is none of these."""
    _cells: dict[int, _Cell] = field(default_factory=dict)

    def holds(self, tensor: Tensor) -> bool:
        """Whether this memory has been seen before."""
        return tensor.untyped_storage().data_ptr() in self._cells

    def read(self, tensor: Tensor) -> Shadow:
        """The shadow of a tensor. What was never seen is a constant or a weight."""
        if tensor.numel() == 0:
            return constant(tensor.shape)
        cell = self._cell(tensor)
        if cell is None:
            return constant(tensor.shape, False)
        if cell.whole is not None:
            if cell.whole[0] == _layout(tensor):
                return cell.whole[1]
            self._lay_out(cell)
        ratio = tensor.itemsize // cell.unit
        if ratio > 1:
            return self._read_wide(cell, tensor, ratio)
        cell.lent = True
        values = {name: self._strided(cell, name, tensor) for name in _FIELDS}
        return Shadow(**values)  # type: ignore[arg-type]  # known is never None

    def write(self, tensor: Tensor, shadow: Shadow) -> None:
        """Set the shadow of the elements of a tensor."""
        if tensor.numel() == 0:
            return
        fresh = not self.holds(tensor)
        cell = self._cell(tensor, fresh_known=False)
        if cell is None:
            return
        shadow = shadow.expand(tensor.shape)
        if fresh and cell.known.shape[0] == tensor.numel() and cell.unit == tensor.itemsize:
            cell.whole = (_layout(tensor), shadow)
            return
        if cell.whole is not None:
            self._lay_out(cell)
        self._write(cell, tensor, shadow, fresh)

    def _lay_out(self, cell: _Cell) -> None:
        """Write what is kept as a whole element by element."""
        assert cell.whole is not None
        (shape, strides, offset, itemsize), shadow = cell.whole
        cell.whole = None
        self._write(cell, _Place(shape, strides, offset, itemsize), shadow, True)

    def _write(self, cell: _Cell, tensor: Tensor | _Place, shadow: Shadow, fresh: bool) -> None:
        ratio = tensor.itemsize // cell.unit
        if cell.lent:
            for name in _FIELDS:
                value = getattr(cell, name)
                if value is not None and value.stride(0) != 0:
                    setattr(cell, name, value.clone())
            cell.lent = False
        for name in _FIELDS:
            value = getattr(shadow, name)
            if value is None and getattr(cell, name) is None:
                continue
            if name == "known" and fresh and _uniform(value):
                size = getattr(cell, name).shape
                cell.known = value.flatten()[:1].clone().expand(size) if value.dim() else value.clone().expand(size)
                continue
            self._open(cell, name)
            for part in range(ratio):
                place = self._strided(cell, name, tensor, ratio, part)
                assert place is not None
                if value is None:
                    place.zero_()
                else:
                    place.copy_(value)

    def _cell(self, tensor: Tensor, fresh_known: bool = True) -> _Cell | None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        cell = self._cells.get(address)
        if cell is None:
            if storage.nbytes() == 0:
                return None
            count = -(-storage.nbytes() // tensor.itemsize)
            foreign = fresh_known and address not in self.weights and tensor.requires_grad
            self.foreign = self.foreign or foreign
            known = fresh_known and address not in self.weights and not foreign
            cell = _Cell(tensor.itemsize, (_KNOWN if known else _UNKNOWN).expand(count))
            self._cells[address] = cell
            weakref.finalize(storage, self._cells.pop, address, None)  # the address may be another's afterwards
        elif tensor.itemsize < cell.unit:
            if cell.whole is not None:
                self._lay_out(cell)
            _refine(cell, cell.unit // tensor.itemsize)
        return cell

    def _open(self, cell: _Cell, name: str) -> None:
        """Make a field of a storage writable."""
        value = getattr(cell, name)
        count = cell.known.shape[0]
        if value is None:
            shape = (count, self.width) if name == "deps" else (count,)
            setattr(cell, name, torch.zeros(shape, dtype=_DTYPES[name]))
        elif name == "known" and value.stride(0) == 0:
            cell.known = value.clone(memory_format=torch.contiguous_format)

    def _strided(self, cell: _Cell, name: str, tensor: Tensor | _Place, ratio: int = 1, part: int = 0) -> Tensor | None:
        value: Tensor | None = getattr(cell, name)
        if value is None:
            return None
        if name == "known" and value.stride(0) == 0:
            return value[0].expand(tensor.shape)
        strides = [s * ratio for s in tensor.stride()]
        offset = tensor.storage_offset() * ratio + part
        if name == "deps":
            wide = [s * self.width for s in strides]
            return value.as_strided((*tensor.shape, self.width), (*wide, 1), offset * self.width)
        return value.as_strided(tensor.shape, strides, offset)

    def _read_wide(self, cell: _Cell, tensor: Tensor, ratio: int) -> Shadow:
        """An element that covers several: a complex number over two real ones."""
        known, deps = None, None
        for part in range(ratio):
            one = self._strided(cell, "known", tensor, ratio, part)
            words = self._strided(cell, "deps", tensor, ratio, part)
            assert one is not None
            known = one if known is None else known & one
            deps = words if deps is None or words is None else deps | words
        assert known is not None
        return Shadow(known, deps)


def _refine(cell: _Cell, ratio: int) -> None:
    cell.unit //= ratio
    for name in _FIELDS:
        value = getattr(cell, name)
        if value is not None:
            setattr(cell, name, value.repeat_interleave(ratio, 0))


def _uniform(known: Tensor) -> bool:
    return known.dim() == 0 or math.prod(known.shape) <= 1 or all(s == 0 for s in known.stride())
