"""Presets: a plan from a few words, such as ``fsdp=2,tp=2,sp,micro=4``.

===============  =====================================================================
``ddp=n``        axis ``replica``: the batch is cut, everything else is whole
``zero1=n``      axis ``data``: optimizer state in shards
``zero2=n``      axis ``data``: gradients and optimizer state in shards
``fsdp=n``       axis ``data``: parameters, gradients and optimizer state in shards (``zero3``)
``tp=n``         axis ``tensor``: heads, MLP width and vocabulary are cut
``sp``           activations between tensor-parallel regions are cut along time
``micro=n``      microbatches; 1 if it is left out, or as many as fill the pipeline of ``pp``
``recompute``    blocks keep nothing for backward but their inputs, and are computed again;
                 ``recompute=k``: every k-th block
``selective``    blocks keep the results of matrix products and attention, the rest is computed
                 again; ``selective=k``: every k-th block
``prefetch=n``   stored weights are gathered n blocks ahead, beside the computation; n is 1
                 if it is left out
``offload``      optimizer state is kept in the host's memory
``numerics=p``   of sums in half precision: ``safe`` takes them in fp32, ``warn`` tells of them,
                 ``as-written`` leaves them
``pp=n``         axis ``pipe``: blocks are cut by depth into n stages, or more with ``virtual``
``schedule=s``   the order of the stages' passes, ``1f1b`` if it is left out, or where
                 microbatches meet ``gpipe``, with ``virtual`` ``breadth-first``
``virtual=n``    stages on each rank; if it is left out, as many as the schedule is made for
``separability=m``  what couplings of samples mean in microbatches: ``global``, ``per-microbatch``
                 or ``per-data-rank``
===============  =====================================================================

One axis may leave its size out; it takes the ranks that the others leave.
"""

from __future__ import annotations

import math

import torch

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.declared import meaning_of
from meshwright.compiler.passes.preset_words import AXES, SAVES, Words, words_of
from meshwright.compiler.passes.separability import called, couplings
from meshwright.compiler.passes.stages import pipeline_of
from meshwright.compiler.passes.tensor_parallel import tensor_cut
from meshwright.compiler.passes.treated import at_every_block
from meshwright.compiler.plan import (
    PIPE,
    Declaration,
    Hashes,
    Numerics,
    ParameterPlan,
    Pipeline,
    Plan,
    Precision,
    Recompute,
    Storage,
)
from meshwright.compiler.recompute_reader import POLICIES
from meshwright.compiler.schedules import catalogue
from meshwright.compiler.search.candidates import FULL, filling_microbatches
from meshwright.compiler.separability_text import declarations


def preset(
    text: str,
    program: StepProgram,
    ranks: int | None = None,
    precision: Precision | None = None,
    separability: tuple[Declaration, ...] = (),
    otherwise: tuple[Declaration, ...] = (),
) -> Plan:
    """The plan that a preset names, for this program; what was chosen because the text does not say it is told by the
    plan's ``reasons``. ``separability`` counts in place of what the text declares, ``otherwise`` where it declares
    nothing.

    Raises E0307 for words it does not know, sizes that do not fit the ranks, or axes named twice."""
    words = words_of(text, ranks)
    sizes, flags, named = words.sizes, words.flags, words.named
    declared = separability or declarations(named.get("separability")) or otherwise
    batch = tuple(axis for axis in ("replica", "data") if any(AXES[w] == axis for w in sizes))
    pipeline, why = _pipeline(words, program, declared)
    chosen, note = None, ""
    if pipeline is not None and "micro" not in flags:
        chosen, note = _microbatches(words, batch, declared, program)
    mesh_axes: list[tuple[str, int]] = [(PIPE, sizes["pp"])] if pipeline is not None else []
    mesh_axes += [(AXES[w], n) for axis in batch for w, n in sizes.items() if AXES[w] == axis]
    parameters: tuple[ParameterPlan, ...] = ()
    tensor: tuple[str, ...] = ()
    degree = sizes.get("tp", 1)
    if "tp" in sizes and degree > 1:
        cut = tensor_cut(program, degree)
        mesh_axes += cut.axes
        tensor = tuple(name for name, _ in cut.axes)
        parameters = cut.plans(Mesh(tuple(mesh_axes)), {p.name: p.name for p in program.parameters})
    elif "tp" in sizes:
        mesh_axes.append(("tensor", 1))
    data = ("data",)
    storage = Storage(
        parameters=data if sizes.keys() & {"fsdp", "zero3"} else (),
        gradients=data if sizes.keys() & {"fsdp", "zero3", "zero2"} else (),
        state=data if sizes.keys() & {"fsdp", "zero3", "zero2", "zero1"} else (),
    )
    return Plan(
        mesh=Mesh(tuple(mesh_axes)),
        batch=batch,
        microbatches=chosen or flags.get("micro", 1),
        storage=storage,
        sequence=tensor if "sp" in flags else (),
        parameters=parameters,
        precision=precision or Precision(),
        numerics=_policy(named.get("numerics", "")),
        recompute=_recompute(flags, program),
        offload=("state",) if "offload" in flags else (),
        prefetch=flags.get("prefetch", 0),
        separability=declared,
        pipeline=pipeline,
        hashes=Hashes(model=program.fingerprint, torch=torch.__version__),
        name=words.text if chosen is None else f"{words.text},micro={chosen}",
        reasons=tuple(filter(None, (note, why))),
    )


def _policy(word: str) -> Numerics:
    """The policy of that name; the default one if none is said. Raises E0307 for one that is unknown."""
    for policy in POLICIES:
        if word == policy:
            return policy
    if word:
        raise error("E0307", f"unknown policy '{word}' of numerics", None, suggestion(word, POLICIES))
    return "warn"


def _pipeline(words: Words, program: StepProgram, declared: tuple[Declaration, ...]) -> tuple[Pipeline | None, str]:
    """What ``pp``, ``schedule`` and ``virtual`` ask for, and why it is another schedule than the usual one. Raises
    E0501 and E0502 for stages that there cannot be."""
    if words.sizes.get("pp", 1) == 1:
        return None, ""
    name, why = words.named.get("schedule", "1f1b"), ""
    if "schedule" not in words.named and words.flags.get("micro") != 1 and (met := _met(program, declared)):
        name = catalogue.meeting_schedule((words.flags.get("virtual") or 1) > 1)
        why = f"schedule={name} was chosen, as 'schedule' was left out: microbatches meet in {', '.join(met)}"
    virtual = words.flags.get("virtual") or catalogue.virtual(name)
    return pipeline_of(program, words.sizes["pp"], name, virtual), why


def _met(program: StepProgram, declared: tuple[Declaration, ...]) -> list[str]:
    """Where samples couple and that is declared global."""
    if not any(one.meaning == "global" for one in declared):
        return []
    found = (called(one) for one in couplings(program) if meaning_of(declared, one.names) == "global")
    return list(dict.fromkeys(found))


def _microbatches(
    words: Words, batch: tuple[str, ...], declared: tuple[Declaration, ...], program: StepProgram
) -> tuple[int, str]:
    """How many microbatches a pipeline gets that says nothing of them, and why: with one, a rank computes while all
    others wait. Where cutting the batch would change what the step means, it is not cut."""
    ranks = math.prod(n for word, n in words.sizes.items() if AXES[word] in batch)
    pipe = words.sizes["pp"]
    count = filling_microbatches(program.batch_size, ranks, pipe)
    left_out = " was chosen, as 'micro' was left out"
    coupled = couplings(program) if count > 1 else ()
    whole = [called(one) for one in coupled if meaning_of(declared, one.names) is None]
    if whole:
        return (
            1,
            f"micro=1{left_out}: samples couple in {', '.join(whole)}, so that the batch of a pipeline cannot be cut",
        )
    enough = count >= FULL * pipe
    why = f"{FULL} or more for each of the {pipe} ranks of '{PIPE}'" if enough else (
        f"the batch of {program.batch_size} samples allows no more"
    )  # fmt: skip
    return count, f"micro={count}{left_out}: {why}"


def _recompute(flags: dict[str, int], program: StepProgram) -> tuple[Recompute, ...]:
    """An entry for each kind of block of the program. Raises E0307 if it has none."""
    for word, save in SAVES.items():
        if word in flags:
            entries = at_every_block(program.micro, Recompute("", save, flags[word]))
            if not entries:
                message, action = f"'{word}': the program has no repeated blocks", f"leave '{word}' out"
                raise error("E0307", message, None, action)
            return entries
    return ()
