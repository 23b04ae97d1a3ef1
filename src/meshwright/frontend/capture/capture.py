"""``capture``: an ``nn.Module``, an example batch, a loss and an optimizer become a :class:`StepProgram`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from meshwright.compiler import collector
from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.fake import fake_tensor
from meshwright.compiler.graph.program import Parameter, StepProgram, TensorSpec, Value
from meshwright.compiler.plan import Precision
from meshwright.frontend.capture import batch as batches
from meshwright.frontend.capture.assemble import finish, lift_constants, split_prologue
from meshwright.frontend.capture.batch import Step
from meshwright.frontend.capture.casts import label_update, place_casts
from meshwright.frontend.capture.contractions import rewrite_contractions
from meshwright.frontend.capture.export import PREFIX, export
from meshwright.frontend.capture.fingerprint import fingerprint
from meshwright.frontend.capture.folding import fold_masks
from meshwright.frontend.capture.joint import trace_joint
from meshwright.frontend.capture.lookups import rewrite_lookups
from meshwright.frontend.capture.loss_scale import SCALE, LossScale, last_read, scale_for
from meshwright.frontend.capture.origins import Blocks, strip
from meshwright.frontend.capture.spread import keep_once
from meshwright.frontend.capture.stand_in import Casts, buffers, cast, casts, parameters
from meshwright.frontend.capture.tidy import tidy
from meshwright.frontend.capture.unsorted import unsort
from meshwright.frontend.capture.update import Optimizers, Owner, capture_update, owners


@collector.rarely()
def capture(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizers = None,
    loss: Callable[..., Any] | None = None,
    clip: float | None = None,
    scalars: Sequence[str] = ("lr",),
    batch_dims: Mapping[str, int | None] | None = None,
    precision: Precision | None = None,
    loss_scale: LossScale | None = None,
) -> StepProgram:
    """Capture one training step at the shapes of the given (whole, global) batch.

    ``batch`` holds real, fake or meta tensors: a tuple is positional, a dict is keyword, ``(args, kwargs)`` is both.
    The model returns its loss, or something with ``.loss``; or ``loss(output, batch)`` computes it from what the
    model returns: the model then gets as many positional elements as it requires, and the keywords that it
    accepts except ``labels``; the loss function gets the batch as given. The model may be on the meta
    device; it is left as it is. ``clip`` is the largest global gradient norm. ``scalars`` are the entries
    of parameter groups that the host may change at each step. The
    default ``precision`` keeps the dtypes of the model. ``loss_scale`` says how the loss is scaled; not said: by the
    defaults where the precision computes in fp16, else not at all.

    Raises MeshwrightError (E0251 to E0258), at the user's line, for what cannot be captured.
    """
    if optimizer is not None and not any(p.requires_grad for p in model.parameters()):
        action = "set requires_grad of those that shall be trained"
        raise error(
            "E0255", "no parameter of the model requires a gradient, so there is nothing to train", None, action
        )
    wanted = casts(precision or Precision(), model)
    call = batches.as_call(batch)
    found = batches.tensors(call)
    batch_size, dims = batches.batch_dims(found, batch_dims)
    owned = owners(model, optimizer)
    logical = tuple(_owned(p, owned) for p in parameters(model, wanted.weights))
    buffer_specs = buffers(model)
    exported = export(Step(model, loss, batch), call, found, wanted.compute)
    scale = scale_for(precision, loss_scale)
    micro = _Micro(model, exported, logical, buffer_specs, found, wanted, set(owned) if scale is not None else set())
    constants: dict[str, Tensor] = {}
    body, inputs, outputs, trained = micro.trace(constants)
    prologue = split_prologue(body, inputs, dims, batch_size)
    micro_graph = finish(body, inputs, outputs)
    update = capture_update(
        [p for p in logical if p.name in trained],
        optimizer,
        owned,
        clip,
        tuple(scalars),
        wanted.reduce,
        constants,
        scale,
    )
    label_update(update.graph, Blocks(model))
    used = {v.name for g in (prologue, micro_graph, update.graph) for v in g.signature.inputs if v.kind == "constant"}
    program = StepProgram(
        prologue,
        micro_graph,
        update.graph,
        logical,
        buffer_specs,
        {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in found.items()},
        dims,
        update.state,
        update.state_init,
        update.scalars,
        {n: t for n, t in constants.items() if n in used},
        batch_size,
        loss_as_written=_dtype_of_loss(exported) if wanted.compute is None else None,
    )
    program.fingerprint = fingerprint(program)
    return program


def _owned(parameter: Parameter, owned: dict[str, Owner]) -> Parameter:
    owner = owned.get(parameter.name)
    group = -1 if owner is None else owner.group
    return Parameter(parameter.name, parameter.spec, parameter.trainable, parameter.aliases, group)


def _dtype_of_loss(exported: ExportedProgram) -> torch.dtype | None:
    name = exported.graph_signature.user_outputs[0]
    value = next((n.meta.get("val") for n in exported.graph.nodes if n.name == name), None)
    return value.dtype if isinstance(value, Tensor) else None


class _Micro:
    """The wiring between an exported program and the joint trace."""

    def __init__(
        self,
        model: nn.Module,
        exported: ExportedProgram,
        logical: tuple[Parameter, ...],
        buffer_specs: dict[str, TensorSpec],
        batch: dict[str, Tensor],
        wanted: Casts,
        scaled: set[str],
    ) -> None:
        self._model = model
        self._exported = exported
        self._logical = logical
        self._buffers = buffer_specs
        self._batch = batch
        self._wanted = wanted
        self._scaled = scaled
        """The parameters that an optimizer owns, where the loss is scaled."""
        self._index = {name: i for i, p in enumerate(logical) for name in (p.name, *p.aliases)}

    def trace(self, constants: dict[str, Tensor]) -> tuple[fx.GraphModule, list[Value], list[Value], set[str]]:
        """The joint graph, its inputs and outputs, and the names of parameters that have a gradient."""
        signature = self._exported.graph_signature
        folded, masks = fold_masks(self._exported.graph)
        constants.update(masks)
        lifted = {
            s.target: self._exported.constants[s.target]
            for s in signature.input_specs
            if s.kind is InputKind.CONSTANT_TENSOR and s.target is not None
        }
        constants.update({n: t for n, t in lifted.items() if isinstance(t, Tensor)})
        names = list(constants)
        shapes = self._fakes(constants)
        outputs = list(signature.output_specs)
        loss_at = next(i for i, s in enumerate(outputs) if s.kind is OutputKind.USER_OUTPUT)
        changed = [i for i, s in enumerate(outputs) if s.kind is OutputKind.BUFFER_MUTATION]
        joint = trace_joint(
            self._exported.graph_module,
            self._arguments(names),
            [fake_tensor(p.spec.shape, p.spec.dtype) for p in self._logical],
            shapes,
            [p.trainable for p in self._logical],
            [cast(p.spec.dtype, self._wanted.compute) for p in self._logical],
            self._wanted.reduce,
            (loss_at, [(i, self._buffers[strip(str(outputs[i].target), PREFIX)].dtype) for i in changed]),
            folded,
            {n: 1 + len(self._buffers) + len(self._batch) + names.index(n) for n in masks},
            Blocks(self._model),
            PREFIX,
            bool(self._scaled),
        )
        inputs = [Value("parameter", p.name) for p in self._logical]
        inputs += [Value("key", "key")]
        inputs += [Value("buffer", n) for n in self._buffers]
        inputs += [Value("batch", n) for n in self._batch]
        inputs += [Value("constant", n) for n in names]
        if self._scaled:
            owner = last_read(joint.module, [p.name for p in self._logical], self._scaled)
            inputs.append(Value("state", f"{owner}/{SCALE}"))
        trained = [p.name for p in self._logical if p.trainable]
        with_gradient = [n for n, has in zip(trained, joint.has_gradient, strict=True) if has]
        results = [Value("loss", "loss")]
        results += [Value("buffer", strip(str(outputs[i].target), PREFIX)) for i in changed]
        results += [Value("gradient", n) for n in with_gradient]
        keep_once(joint.module)
        lift_constants(joint.module, inputs, constants, "micro_")
        rewrite_contractions(joint.module)
        tidy(joint.module)
        unsort(joint.module)
        rewrite_lookups(joint.module)
        place_casts(joint.module.graph, inputs, results, Blocks(self._model))
        return joint.module, inputs, results, set(with_gradient)

    def _fakes(self, constants: dict[str, Tensor]) -> list[Tensor]:
        made = [fake_tensor((2,), torch.int64)]
        made += [fake_tensor(s.shape, s.dtype) for s in self._buffers.values()]
        made += [fake_tensor(t.shape, t.dtype) for t in self._batch.values()]
        made += [fake_tensor(t.shape, t.dtype) for t in constants.values()]
        if self._scaled:
            made.append(fake_tensor((), torch.float32))
        return made

    def _arguments(self, constants: list[str]) -> Callable[[list[Tensor], list[Tensor]], list[Any]]:
        """What the exported graph's placeholders take, given parameters in compute dtype and the other inputs."""
        signature = self._exported.graph_signature
        places = {n: i for i, n in enumerate(self._buffers, 1)}
        first_batch = 1 + len(self._buffers)
        first_constant = first_batch + len(self._batch)
        by_constant = {n: first_constant + i for i, n in enumerate(constants)}
        sources: list[tuple[str, int]] = []
        batch_order = iter(range(first_batch, first_constant))
        for spec in signature.input_specs:
            name = str(spec.target)
            if spec.kind is InputKind.PARAMETER:
                sources.append(("parameter", self._index[strip(name, PREFIX)]))
            elif spec.kind is InputKind.BUFFER:
                sources.append(("other", places[strip(name, PREFIX)]))
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                sources.append(("other", by_constant[name]))
            else:
                sources.append(("input", -1))
        tensors = self._tensor_inputs()
        values = self._exported.graph.find_nodes(op="placeholder")
        dtypes = [n.meta["val"].dtype if isinstance(n.meta.get("val"), Tensor) else None for n in values]

        def give(parameters: list[Tensor], others: list[Tensor]) -> list[Any]:
            found: list[Any] = []
            order = iter(batch_order_list)
            flags = iter(tensors)
            for (kind, at), dtype in zip(sources, dtypes, strict=True):
                if kind == "parameter":
                    value: Any = parameters[at]
                elif kind == "other":
                    value = others[at]
                else:
                    value = others[next(order)] if next(flags) else None
                if isinstance(value, Tensor) and dtype is not None and value.dtype != dtype:
                    value = value.to(dtype)
                found.append(value)
            return found

        batch_order_list = list(batch_order)
        return give

    def _tensor_inputs(self) -> list[bool]:
        """For each user input of the exported graph, whether it is a tensor (numbers are part of the program)."""
        flags = []
        specs = self._exported.graph_signature.input_specs
        for spec, node in zip(specs, self._exported.graph.find_nodes(op="placeholder"), strict=True):
            if spec.kind is InputKind.USER_INPUT:
                flags.append(isinstance(node.meta.get("val"), Tensor))
        return flags
