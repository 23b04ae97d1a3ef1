"""One step of one rank: prologue, ``micro`` once per microbatch, update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Unpack

from torch import Tensor

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.runtime.accumulate import AllTaken, Product, Taken
from meshwright.runtime.deposit import runnable, taking
from meshwright.runtime.holdings import Holdings, input_dtype
from meshwright.runtime.inplace import update_in_place
from meshwright.runtime.rounds import Kept, rounds_of
from meshwright.runtime.step_executor import Feed, Local, Options, RankCommunicator, StepExecutor


class Executor(StepExecutor):
    """Runs the steps of one rank of a program that all ranks run alike."""

    rank_program: RankProgram

    def __init__(
        self,
        rank_program: RankProgram,
        communicator: RankCommunicator,
        holdings: Holdings,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(rank_program, communicator, holdings, **options)
        self._micro = runnable(rank_program.micro, deposits=self.microbatches > 1)
        self._rounds = rounds_of(self._micro)
        self._in_place = update_in_place(rank_program.update)
        self._dtypes = {v: input_dtype(rank_program.update, v) for v in rank_program.update.signature.inputs}

    def _microbatches(self, feed: Feed, key: Tensor) -> dict[Value, Local]:
        communicator, graph = self.communicator, self.rank_program.micro
        prologue = self._prologue(feed, key)
        accumulators = {v: self._accumulator(v, s) for v, s in graph.outputs.items()}
        # a value of a microbatch that waits may lie in the memory of what it has given already
        taken = AllTaken() if self._rounds else Taken()

        def put(at: int, value: Tensor | Product) -> None:
            accumulators[graph.signature.outputs[at]].add(value, taken, communicator.microbatch)

        def inputs_of(microbatch: int) -> list[Tensor]:
            communicator.microbatch = microbatch
            return [self._micro_input(v, graph.inputs[v], feed, prologue, key) for v in graph.signature.inputs]

        with taking(put):
            for outputs in self._in_rounds(inputs_of) if self._rounds else self._one_by_one(inputs_of, taken):
                for at, output in enumerate(outputs):
                    if output is not None:  # else it was deposited
                        put(at, output)
        communicator.microbatch = 0
        return {v: Local(*accumulators.pop(v).take()) for v in graph.signature.outputs}

    def _one_by_one(self, inputs_of: Callable[[int], list[Tensor]], taken: Taken) -> Iterator[list[Tensor | None]]:
        """The outputs of each microbatch, run from its beginning to its end."""
        for microbatch in range(self.microbatches):
            inputs = inputs_of(microbatch)
            if not microbatch:
                taken.whole(inputs)
                taken.whole(t for _, t in self.holdings.items())
            yield list(self._micro(*inputs))

    def _in_rounds(self, inputs_of: Callable[[int], list[Tensor]]) -> Iterator[list[Tensor | None]]:
        """The same where microbatches meet: none is ahead of another by more than a round."""
        names = [node.name for node in self._micro.graph.find_nodes(op="placeholder")]
        kept: list[Kept] = [{} for _ in range(self.microbatches)]
        for number, each in enumerate(self._rounds):
            for microbatch, mine in enumerate(kept):
                if not number:
                    mine.update(zip(names, inputs_of(microbatch), strict=True))
                self.communicator.microbatch = microbatch
                outputs = each.run(mine)
                if not each.meetings:
                    mine.clear()
                    yield outputs
            each.meet(kept, self.communicator)

    def _update(
        self, gradients: dict[str, Local], key: Tensor, scalars: Mapping[str, float]
    ) -> dict[Value, Local]:  # fmt: skip
        graph = self.rank_program.update
        inputs: list[Tensor] = []
        for value in graph.signature.inputs:
            sharding = graph.inputs[value]
            if value.kind == "gradient":
                gradient = gradients.pop(value.name)
                if gradient.sharding != sharding:
                    raise InternalError(f"gradient '{value.name}' lies as {gradient.sharding}, update takes {sharding}")
                inputs.append(gradient.value.to(self._dtypes[value] or gradient.value.dtype))
                del gradient
            else:
                inputs.append(self._update_input(value, sharding, key, scalars))
        gradients.clear()
        outputs = self._in_place.module(inputs)
        return {v: Local(t, graph.outputs[v]) for v, t in zip(self._in_place.outputs, outputs, strict=True)}
