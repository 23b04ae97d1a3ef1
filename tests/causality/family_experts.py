"""Mixtures of experts: who goes to which expert, who finds no place there, and in which order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.case import WIDTH, Tokens, expect

EXPERTS = 4


class Experts(Tokens):
    """Router and expert weights; subclasses say who goes where."""

    def make(self) -> None:
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def expert(self, e: int, h: Tensor) -> Tensor:
        return (h @ self.w[e]).tanh()

    def mix(self, h: Tensor) -> Tensor:
        rows = h.reshape(-1, WIDTH)
        return self.route(rows, self.router(rows).softmax(-1)).reshape(h.shape)

    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        raise NotImplementedError

    def all_experts(self, rows: Tensor) -> Tensor:
        return torch.einsum("nd,edf->nef", rows, self.w).tanh()


@expect("CAUSAL")
class DenseMixture(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        return (self.all_experts(rows) * p[..., None]).sum(1)


@expect("CAUSAL")
class TokenChoiceTopTwo(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.topk(2, -1)
        picked = self.all_experts(rows).gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return (picked * gate[..., None]).sum(1)


@expect("CAUSAL")
class TokenChoiceByMask(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        mask = F.one_hot(p.topk(2, -1).indices, EXPERTS).sum(1)
        return (self.all_experts(rows) * (p * mask)[..., None]).sum(1)


@expect("CAUSAL")
class TokenChoiceByFullSort(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, order = p.sort(-1, descending=True)
        w = self.w[order[:, :2]]
        return (torch.einsum("nd,nkdf->nkf", rows, w).tanh() * gate[:, :2, None]).sum(1)


@expect("CAUSAL")
class LoopOverExperts(Experts):
    """For each expert the rows that chose it, added back where they came from."""

    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.topk(2, -1)
        out = torch.zeros_like(rows)
        for e in range(EXPERTS):
            token, place = torch.where(chosen == e)
            out.index_add_(0, token, self.expert(e, rows[token]) * gate[token, place, None])
        return out


@expect("CAUSAL")
class LoopThatSkipsIdleExperts(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.max(-1)
        out = torch.zeros_like(rows)
        for e in range(EXPERTS):
            mask = chosen == e
            if not mask.any():
                continue
            out[mask] = self.expert(e, rows[mask]) * gate[mask, None]
        return out


@expect("CAUSAL")
class LoopOverHitExperts(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.topk(2, -1)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(rows)
        for e in mask.sum((1, 2)).nonzero():
            place, token = torch.where(mask[e[0]])
            out.index_add_(0, token, (rows[token] @ self.w[e[0]]).tanh() * gate[token, place, None])
        return out


@expect("CAUSAL")
class DroplessSorted(Experts):
    """Copies of the rows sorted by expert, each with its own weights, scattered back."""

    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.topk(2, -1)
        e = chosen.flatten()
        order = e.argsort(stable=True)
        made = torch.bmm(rows[order // 2].unsqueeze(1), self.w[e[order]]).squeeze(1).tanh()
        made = made * gate.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // 2, made)


@expect("CAUSAL")
class DroplessBackByInverse(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.topk(2, -1)
        e = chosen.flatten()
        sorted_e, order = e.sort()
        made = torch.einsum("nd,ndf->nf", rows[order // 2], self.w[sorted_e]).tanh()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return (made[back].unflatten(0, (-1, 2)) * gate[..., None]).sum(1)


@expect("CAUSAL")
class DroplessBackByAssignment(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.topk(2, -1)
        e = chosen.flatten()
        order = e.argsort()
        made = torch.einsum("nd,ndf->nf", rows[order // 2], self.w[e[order]]).tanh()
        back = torch.empty_like(made)
        back[order] = made
        return (back.unflatten(0, (-1, 2)) * gate[..., None]).sum(1)


@expect("CAUSAL")
class DroplessInSlices(Experts):
    """Sorted rows cut into one slice for each expert, by counts that are read."""

    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.topk(2, -1)
        e = chosen.flatten()
        order = e.argsort()
        taken = rows[order // 2]
        start, parts = 0, []
        for i, count in enumerate(torch.bincount(e, minlength=EXPERTS).tolist()):
            if count:
                parts.append(self.expert(i, taken[start : start + count]))
            start += count
        made = torch.cat(parts)
        back = torch.empty_like(made)
        back[order] = made
        return (back.unflatten(0, (-1, 2)) * gate[..., None]).sum(1)


@expect("CAUSAL")
class DroplessGroupedProduct(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.topk(2, -1)
        e, order = chosen.flatten().sort()
        ends = torch.histc(e.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        made = F.grouped_mm(rows[order // 2], self.w, offs=ends).tanh() * gate.flatten()[order, None]
        return torch.zeros_like(rows).index_add_(0, order // 2, made)


@expect("LEAK", "future", "batch")
class ExpertChoiceOverAll(Experts):
    """Each expert takes the rows that score highest, of all in the batch."""

    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.t().topk(rows.shape[0] // EXPERTS, -1)
        out = torch.zeros_like(rows)
        for e in range(EXPERTS):
            out = out.index_add(0, chosen[e], self.expert(e, rows[chosen[e]]) * gate[e, :, None])
        return out


@expect("LEAK", "future")
class ExpertChoicePerSample(Experts):
    def mix(self, h: Tensor) -> Tensor:
        p = self.router(h).softmax(-1)
        out = torch.zeros_like(h)
        for e in range(EXPERTS):
            gate, chosen = p[..., e].topk(h.shape[1] // EXPERTS, -1)
            place = chosen[..., None].expand(-1, -1, WIDTH)
            out = out.scatter_add(1, place, self.expert(e, h.gather(1, place)) * gate[..., None])
        return out


@expect("LEAK", "future", "batch")
class ExpertChoiceBySortAndSlice(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for e in range(EXPERTS):
            best = p[:, e].argsort(descending=True)[: rows.shape[0] // EXPERTS]
            out.index_add_(0, best, self.expert(e, rows[best]) * p[best, e, None])
        return out


class Switch(Experts):
    """One expert for each row, of which each takes ``capacity``, in the order of the rows."""

    def keep(self, chosen: Tensor, capacity: int) -> Tensor:
        mask = F.one_hot(chosen, EXPERTS)
        place = mask.cumsum(-2) * mask
        return (place.sum(-1) <= capacity) & (place.sum(-1) > 0)

    def taken(self, rows: Tensor, p: Tensor, keep: Tensor) -> Tensor:
        gate, chosen = p.max(-1)
        made = torch.einsum("...d,...df->...f", rows, self.w[chosen]).tanh()
        return made * (gate * keep)[..., None]


@expect("LEAK", "batch")
class SwitchBatchMajor(Switch):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        return self.taken(rows, p, self.keep(p.argmax(-1), rows.shape[0] // EXPERTS))


@expect("LEAK", "batch")
class SwitchTimeMajor(Switch):
    def mix(self, h: Tensor) -> Tensor:
        return super().mix(h.transpose(0, 1)).transpose(0, 1)

    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        return self.taken(rows, p, self.keep(p.argmax(-1), rows.shape[0] // EXPERTS))


@expect("CAUSAL")
class SwitchPerSample(Switch):
    def mix(self, h: Tensor) -> Tensor:
        p = self.router(h).softmax(-1)
        return self.taken(h, p, self.keep(p.argmax(-1), 2))


@expect("CAUSAL")
class SwitchPerSampleByDispatch(Experts):
    """Rows go into slots of their experts by a product with zeros and ones, and come back likewise."""

    def mix(self, h: Tensor) -> Tensor:
        gate, chosen = self.router(h).softmax(-1).max(-1)
        capacity = 3
        mask = F.one_hot(chosen, EXPERTS)
        place = ((mask.cumsum(1) - 1) * mask).sum(-1)
        keep = place < capacity
        slot = F.one_hot(place.clamp(max=capacity - 1), capacity) * keep[..., None]
        dispatch = (mask[..., None] * slot[..., None, :]).to(h.dtype)
        inside = torch.einsum("btec,btd->becd", dispatch, h)
        made = torch.einsum("becd,edf->becf", inside, self.w).tanh()
        return torch.einsum("btec,becf->btf", dispatch * gate[..., None, None], made)


@expect("LEAK", "batch")
class SwitchByDispatchOverAll(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.max(-1)
        capacity = rows.shape[0] // EXPERTS
        mask = F.one_hot(chosen, EXPERTS)
        place = ((mask.cumsum(0) - 1) * mask).sum(-1)
        slot = F.one_hot(place.clamp(max=capacity - 1), capacity) * (place < capacity)[..., None]
        dispatch = (mask[..., None] * slot[:, None]).to(rows.dtype)
        made = torch.einsum("ecd,edf->ecf", torch.einsum("nec,nd->ecd", dispatch, rows), self.w).tanh()
        return torch.einsum("nec,ecf->nf", dispatch * gate[:, None, None], made)


class TwoChoices(Experts):
    """Top two, where the second choices of all queue behind the first choices of all."""

    share = 2.0

    def mix(self, h: Tensor) -> Tensor:
        p = self.router(h).softmax(-1)
        gate, chosen = p.topk(2, -1)
        capacity = max(1, int(self.share * h.shape[1] / EXPERTS))
        first, second = F.one_hot(chosen[..., 0], EXPERTS), F.one_hot(chosen[..., 1], EXPERTS)
        place_first = (first.cumsum(1) * first).sum(-1)
        place_second = ((second.cumsum(1) + first.sum(1, keepdim=True)) * second).sum(-1)
        keep = torch.stack([place_first, place_second], -1) <= capacity
        made = torch.einsum("btd,btkdf->btkf", h, self.w[chosen]).tanh()
        return (made * (gate * keep)[..., None]).sum(2)


@expect("LEAK", "future")
class SecondChoicesQueueBehind(TwoChoices):
    pass


@expect("LEAK", "future")
class SecondChoicesQueueBehindWithRoom(TwoChoices):
    """Room for almost all: a second choice seldom finds none."""

    share = 3.9


@expect("CAUSAL")
class ChoicesQueueTogether(TwoChoices):
    """First and second choices of a position stand together, positions in order."""

    def mix(self, h: Tensor) -> Tensor:
        gate, chosen = self.router(h).softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen.flatten(1), EXPERTS)
        place = (mask.cumsum(1) * mask).sum(-1).unflatten(1, (-1, 2))
        made = torch.einsum("btd,btkdf->btkf", h, self.w[chosen]).tanh()
        return (made * (gate * (place <= 3))[..., None]).sum(2)


@expect("LEAK", "future", "batch")
class DropsByScore(Experts):
    """Of those who choose an expert the ones with the highest score stay."""

    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.max(-1)
        mask = F.one_hot(chosen, EXPERTS)
        rank = (-gate).argsort().argsort()
        better = (rank[None, :] < rank[:, None]).to(torch.int64)
        place = ((better @ mask) * mask).sum(-1)
        made = torch.einsum("nd,ndf->nf", rows, self.w[chosen]).tanh()
        return made * (gate * (place < 4))[:, None]


@expect("LEAK", "future", "batch")
class DropsInSortedOrder(Experts):
    """Rows are ranked by score before they queue, as in batch-prioritised routing."""

    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        gate, chosen = p.max(-1)
        order = gate.argsort(descending=True)
        mask = F.one_hot(chosen[order], EXPERTS)
        keep_sorted = (mask.cumsum(0) * mask).sum(-1) <= 4
        keep = torch.zeros_like(keep_sorted)
        keep[order] = keep_sorted
        made = torch.einsum("nd,ndf->nf", rows, self.w[chosen]).tanh()
        return made * (gate * keep)[:, None]


class Depths(Tokens):
    """Some positions go through a block, others around it."""

    def make(self) -> None:
        self.router = nn.Linear(WIDTH, 1)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


@expect("LEAK", "future")
class DepthsByTopK(Depths):
    def mix(self, h: Tensor) -> Tensor:
        score = self.router(h)[..., 0]
        chosen = score.topk(h.shape[1] // 2, 1).indices
        place = chosen.sort(1).values[..., None].expand(-1, -1, WIDTH)
        through = self.block(h.gather(1, place)) * score.gather(1, place[..., 0])[..., None]
        return torch.zeros_like(h).scatter_add(1, place, through)


@expect("CAUSAL")
class DepthsByThreshold(Depths):
    def mix(self, h: Tensor) -> Tensor:
        score = self.router(h)
        return torch.where(score > 0, self.block(h) * score.sigmoid(), 0.0)


@expect("LEAK", "future")
class DepthsByMedian(Depths):
    def mix(self, h: Tensor) -> Tensor:
        score = self.router(h)
        return torch.where(score > score.median(1, keepdim=True).values, self.block(h), 0.0)


@expect("LEAK", "future", "batch")
class BalancedByTheBatch(Experts):
    """A bias of the router from how often each expert was chosen in this very batch."""

    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        load = F.one_hot(p.argmax(-1), EXPERTS).float().mean(0)
        chosen = (p - load).argmax(-1)
        return torch.einsum("nd,ndf->nf", rows, self.w[chosen]).tanh()


@expect("LEAK", "future", "batch")
class SinkhornRouting(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        plan = p
        for _ in range(3):
            plan = plan / plan.sum(0, keepdim=True)
            plan = plan / plan.sum(1, keepdim=True)
        return (self.all_experts(rows) * (p * F.one_hot(plan.argmax(-1), EXPERTS))[..., None]).sum(1)


@expect("CAUSAL")
class StraightThroughRouter(Experts):
    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        hard = F.one_hot(p.argmax(-1), EXPERTS).to(p.dtype)
        return (self.all_experts(rows) * (hard - p.detach() + p)[..., None]).sum(1)


@expect("CAUSAL")
class CapacityThatSufficesForAll(Switch):
    """The queue is counted over the whole batch and nobody ever finds no place."""

    def route(self, rows: Tensor, p: Tensor) -> Tensor:
        return self.taken(rows, p, self.keep(p.argmax(-1), rows.shape[0]))
