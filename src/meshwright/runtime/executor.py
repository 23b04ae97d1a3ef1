"""One step of one rank: prologue, ``micro`` once per microbatch, update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from torch import Tensor

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.runtime.accumulate import Taken
from meshwright.runtime.deposit import runnable, taking
from meshwright.runtime.holdings import Holdings, input_dtype
from meshwright.runtime.inplace import update_in_place
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
        self._in_place = update_in_place(rank_program.update)
        self._dtypes = {v: input_dtype(rank_program.update, v) for v in rank_program.update.signature.inputs}

    def _microbatches(self, feed: Feed, key: Tensor) -> dict[Value, Local]:
        communicator, graph = self.communicator, self.rank_program.micro
        prologue = self._prologue(feed, key)
        accumulators = {v: self._accumulator(v, s) for v, s in graph.outputs.items()}
        taken = Taken()
        for microbatch in range(self.microbatches):
            communicator.microbatch = microbatch
            inputs = [self._micro_input(v, graph.inputs[v], feed, prologue, key) for v in graph.signature.inputs]
            if not microbatch:
                taken.whole(inputs)
                taken.whole(t for _, t in self.holdings.items())
            with taking(lambda at, x: accumulators[graph.signature.outputs[at]].add(x, taken, communicator.microbatch)):
                outputs = list(self._micro(*inputs))
            for value, output in zip(graph.signature.outputs, outputs, strict=True):
                if output is not None:  # else it was deposited
                    accumulators[value].add(output, taken, microbatch)
        communicator.microbatch = 0
        return {v: Local(*accumulators.pop(v).take()) for v in graph.signature.outputs}

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
