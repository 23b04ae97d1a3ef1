"""Mixtures of experts that sort their rows, each in its own way; some that drop nothing, and some that do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, EXPERTS, CHOICES = 8, 6, 4, 2


class Experts(nn.Module):
    """Router and weights; subclasses say how rows get to their experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, INNER) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        gate, chosen = self.router(rows).softmax(-1).topk(CHOICES, -1)
        made = self.route(rows, gate / gate.sum(-1, keepdim=True), chosen).reshape(x.shape)
        return F.mse_loss(x + made, target)

    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError

    def each(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Each row by the expert of its own."""
        inner = torch.einsum("nd,ndf->nf", rows, self.up[expert]) + self.bias[expert]
        return torch.einsum("nf,nfd->nd", inner.tanh(), self.down[expert])


class Plain(Experts):
    """No sort at all: what all that drop nothing compute."""

    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        made = self.each(rows.repeat_interleave(CHOICES, 0), chosen.flatten())
        return (made.unflatten(0, (-1, CHOICES)) * gate[..., None]).sum(1)


class AddedBack(Experts):
    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        expert = chosen.flatten()
        order = expert.argsort(stable=True)
        made = self.each(rows[order // CHOICES], expert[order]) * gate.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // CHOICES, made)


class ByInverse(Experts):
    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        expert, order = chosen.flatten().sort()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return (self.each(rows[order // CHOICES], expert)[back].unflatten(0, (-1, CHOICES)) * gate[..., None]).sum(1)


class ByOrderOfOrder(Experts):
    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(descending=True)
        made = self.each(rows[order // CHOICES], chosen.flatten()[order])
        return (made[order.argsort()].unflatten(0, (-1, CHOICES)) * gate[..., None]).sum(1)


class Assigned(Experts):
    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        expert, order = chosen.flatten().sort()
        made = self.each(rows[order // CHOICES], expert)
        back = torch.empty_like(made)
        back[order] = made
        return (back.unflatten(0, (-1, CHOICES)) * gate[..., None]).sum(1)


class Scattered(Experts):
    """Choices outermost, and places spread over the width, as for gather and scatter."""

    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        expert, order = chosen.t().flatten().sort()
        place = (order % len(rows)).unsqueeze(-1).expand(-1, WIDTH)
        made = self.each(rows.gather(0, place), expert) * gate.t().flatten()[order].unsqueeze(-1)
        return torch.zeros_like(rows).scatter_add(0, place, made)


class ByTable(Experts):
    """The token of each copy is read from a table."""

    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        token = torch.arange(len(rows)).repeat_interleave(CHOICES)
        expert, order = chosen.flatten().sort()
        made = self.each(rows[token[order]], expert) * gate.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, token[order], made)


class Grouped(Experts):
    """Grouped products, with groups counted as ``transformers`` does."""

    def ends(self, expert: Tensor) -> Tensor:
        return torch.histc(expert.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)

    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        expert, order = chosen.flatten().sort()
        ends = self.ends(expert)
        inner = F.grouped_mm(rows[order // CHOICES], self.up, offs=ends) + self.bias[expert]
        made = F.grouped_mm(inner.tanh(), self.down, offs=ends) * gate.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // CHOICES, made)


class GroupedByCount(Grouped):
    def ends(self, expert: Tensor) -> Tensor:
        return torch.bincount(expert, minlength=EXPERTS).cumsum(0).to(torch.int32)


class GroupedByMarks(Grouped):
    def ends(self, expert: Tensor) -> Tensor:
        return F.one_hot(expert, EXPERTS).sum(0).cumsum(0).to(torch.int32)


KEPT = (AddedBack, ByInverse, ByOrderOfOrder, Assigned, Scattered, ByTable, Grouped, GroupedByCount, GroupedByMarks)
"""Nothing is dropped: what a token gets does not depend on other tokens."""


class PlainBalanced(Plain):
    """With the balance loss of published models, whose shares are a histogram."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        p = self.router(x.reshape(-1, WIDTH)).softmax(-1)
        chosen = p.topk(CHOICES, -1).indices
        share = torch.histc(chosen.flatten().to(x.dtype), EXPERTS, 0, EXPERTS - 1) / chosen.numel()
        return super().forward(x, target) + 0.3 * (share * p.mean(0)).sum()


class GroupedBalanced(Grouped, PlainBalanced):
    """The same, sorted."""


class Room(Experts):
    """Of each expert the first rows in sorted order; the others are dropped."""

    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        expert, order = chosen.flatten().sort()
        counts = F.one_hot(expert, EXPERTS).sum(0)
        place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[expert]
        made = self.each(rows[order // CHOICES], expert) * (gate.flatten()[order] * (place < 3))[:, None]
        return torch.zeros_like(rows).index_add(0, order // CHOICES, made)


class FirstOfAll(Experts):
    """The first half of the sorted rows."""

    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        expert = chosen.flatten()
        order = expert.argsort()[: len(rows)]
        made = self.each(rows[order // CHOICES], expert[order]) * gate.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // CHOICES, made)


class RankedByGate(Experts):
    """Those whose gate ranks low are dropped."""

    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        rank = gate.flatten().argsort(descending=True).argsort()
        made = self.each(rows.repeat_interleave(CHOICES, 0), chosen.flatten())
        kept = gate.flatten() * (rank < len(rows))
        return (made * kept[:, None]).unflatten(0, (-1, CHOICES)).sum(1)


class OtherGroups(Grouped):
    """Groups of equal size, whatever was chosen: rows get the weights of their place."""

    def ends(self, expert: Tensor) -> Tensor:
        return (torch.arange(EXPERTS) + 1).to(torch.int32) * (len(expert) // EXPERTS)


class Descending(Grouped):
    """Groups end where the sorted keys of another order would."""

    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(descending=True)
        made = F.grouped_mm(rows[order // CHOICES], self.up, offs=self.ends(chosen.flatten())).tanh()
        made = F.grouped_mm(made, self.down, offs=self.ends(chosen.flatten()))
        return torch.zeros_like(rows).index_add(0, order // CHOICES, made)


class Neighbours(Experts):
    """Each row is mixed with the one before it in sorted order."""

    def route(self, rows: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        expert, order = chosen.flatten().sort()
        made = self.each(rows[order // CHOICES], expert)
        made = made + 0.5 * made.roll(1, 0)
        return torch.zeros_like(rows).index_add(0, order // CHOICES, made)


DROPPED = (Room, FirstOfAll, RankedByGate, OtherGroups, Descending, Neighbours)
"""What a token gets depends on the others of the batch."""
