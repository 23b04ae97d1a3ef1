"""What is pinned by hand: candidates that keep to it are the only ones that are looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from meshwright.compiler.diagnostics import Span, error
from meshwright.compiler.plan import Declaration, Numerics, ParameterPlan, Recompute, Save
from meshwright.compiler.search.candidate import DATA, REPLICA, TENSOR, Candidate


@dataclass(frozen=True)
class Placed:
    """What tensor parallelism cuts, where a source says it instead of the planner."""

    axes: tuple[tuple[str, int], ...]
    """In place of the candidate's tensor axis; their sizes multiply to its size."""
    parameters: tuple[ParameterPlan, ...]


@dataclass(frozen=True)
class Pins:
    """What is fixed; None: free. ``words`` says by field which word fixed it, for errors."""

    replica: int | None = None
    data: int | None = None
    tensor: int | None = None
    tensor_wanted: bool = False
    """``tp`` without a number: some tensor parallelism."""
    storage: int | None = None
    copies: bool = False
    """``ddp`` without a number: some replication, over all ranks unless something else is sharded."""
    sequence: bool | None = None
    microbatches: int | None = None
    save: Save | None = None
    every: int | None = None
    prefetch: int | None = None
    offload: bool | None = None
    whole: tuple[str, ...] | None = None
    numerics: Numerics | None = None
    pipe: int | None = None
    pipe_wanted: bool = False
    """``pp`` without a number: some pipeline."""
    schedule: str | None = None
    virtual: int | None = None
    by_stage: bool | None = None
    placed: Placed | None = None
    """Counts in candidates with as many tensor ranks."""
    recompute: tuple[Recompute, ...] | None = None
    """Named parts that are computed again, in candidates that recompute nothing else."""
    separability: tuple[Declaration, ...] | None = None
    """What couplings of samples mean in microbatches."""
    words: tuple[tuple[str, str], ...] = ()
    places: tuple[tuple[str, Span | None], ...] = field(default=(), compare=False)

    def word(self, name: str) -> str:
        return dict(self.words).get(name, name)

    def place(self, name: str) -> Span | None:
        return dict(self.places).get(name)

    @property
    def pipelined(self) -> bool:
        """Whether a pipeline is asked for."""
        return self.pipe_wanted or (self.pipe or 1) > 1

    @property
    def text(self) -> str:
        return ",".join(dict.fromkeys(word for _, word in self.words))

    def said(self, names: Iterable[str], word: str, place: Span | None) -> Pins:
        """The same pins; ``word`` at ``place`` fixed these fields."""
        names = tuple(names)
        words, places = dict(self.words), dict(self.places)
        words.update(dict.fromkeys(names, word))
        places.update(dict.fromkeys(names, place))
        return replace(self, words=tuple(words.items()), places=tuple(places.items()))

    def allows_save(self, save: Save) -> bool:
        """Whether blocks may keep so much."""
        return self.save is None or self.save == save

    def joined(self, further: Pins) -> Pins:
        """These pins and further ones. Raises MeshwrightError E0432 where they contradict each other."""
        fields = ("replica", "data", "tensor", "storage", "sequence", "microbatches", "save", "every", "prefetch",
                  "offload", "whole", "numerics", "pipe", "schedule", "virtual", "by_stage", "placed",
                  "recompute", "separability")  # fmt: skip
        for name in fields:
            mine, other = getattr(self, name), getattr(further, name)
            if mine is not None and other is not None and mine != other:
                raise error(
                    "E0432",
                    f"the pins '{self.word(name)}' and '{further.word(name)}' contradict each other",
                    further.place(name) or self.place(name),
                    f"keep one of '{self.word(name)}' and '{further.word(name)}'",
                )
        changes = {n: getattr(further, n) for n in fields if getattr(further, n) is not None}
        changes["tensor_wanted"] = self.tensor_wanted or further.tensor_wanted
        changes["copies"] = self.copies or further.copies
        changes["pipe_wanted"] = self.pipe_wanted or further.pipe_wanted
        changes["words"] = tuple((dict(self.words) | dict(further.words)).items())
        changes["places"] = tuple((dict(self.places) | dict(further.places)).items())
        return replace(self, **changes)

    def allow(self, candidate: Candidate) -> bool:
        """Whether a candidate keeps to what is pinned."""
        wanted = {
            "replica": (self.replica, candidate.size(REPLICA)),
            "data": (self.data, candidate.size(DATA)),
            "tensor": (self.tensor, candidate.size(TENSOR)),
            "storage": (self.storage, candidate.storage),
            "sequence": (self.sequence, candidate.sequence),
            "microbatches": (self.microbatches, candidate.microbatches),
            "save": (self.save, candidate.save),
            "every": (self.every, candidate.every),
            "prefetch": (self.prefetch, candidate.prefetch),
            "offload": (self.offload, candidate.offload),
            "whole": (self.whole, candidate.whole),
            "pipe": (self.pipe, candidate.pipe),
            "schedule": (self.schedule, candidate.schedule),
            "virtual": (self.virtual, candidate.virtual),
            "by_stage": (self.by_stage, candidate.by_stage),
        }
        if self.pipe_wanted and candidate.pipe == 1:
            return False
        if self.tensor_wanted and candidate.size(TENSOR) == 1:
            return False
        if self.copies and candidate.size(REPLICA) == 1 and candidate.ranks > 1:
            return False
        return all(pin is None or pin == value for pin, value in wanted.values())
