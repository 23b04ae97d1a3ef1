"""Presets: a plan from a few words, such as ``fsdp=2,tp=2,sp,micro=4``.

===============  =====================================================================
``ddp=n``        axis ``replica``: the batch is cut, everything else is whole
``zero1=n``      axis ``data``: optimizer state in shards
``zero2=n``      axis ``data``: gradients and optimizer state in shards
``fsdp=n``       axis ``data``: parameters, gradients and optimizer state in shards (``zero3``)
``tp=n``         axis ``tensor``: heads, MLP width and vocabulary are cut
``sp``           activations between tensor-parallel regions are cut along time
``micro=n``      microbatches
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
``schedule=s``   the order of the stages' passes, ``1f1b`` if it is left out
``virtual=n``    stages on each rank; if it is left out, as many as the schedule is made for
``separability=m``  what couplings of samples mean in microbatches: ``global``, ``per-microbatch``
                 or ``per-data-rank``
===============  =====================================================================

One axis may leave its size out; it takes the ranks that the others leave.
"""

from __future__ import annotations

import math
import re

import torch

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.stages import pipeline_of
from meshwright.compiler.passes.tensor_parallel import tensor_cut
from meshwright.compiler.passes.treated import at_every_block
from meshwright.compiler.plan import (
    PIPE,
    Hashes,
    Numerics,
    ParameterPlan,
    Pipeline,
    Plan,
    Precision,
    Recompute,
    Save,
    Storage,
)
from meshwright.compiler.recompute_reader import POLICIES
from meshwright.compiler.schedules import catalogue
from meshwright.compiler.separability_text import declarations

_AXES = {"ddp": "replica", "zero1": "data", "zero2": "data", "zero3": "data", "fsdp": "data", "tp": "tensor"}
_AXES |= {"pp": PIPE}
_FLAGS = ("sp", "micro", "recompute", "selective", "prefetch", "offload", "virtual")
_NUMBERED = ("micro", "recompute", "selective", "prefetch", "virtual")
_SCHEDULE = "schedule"
_NUMERICS = "numerics"
_SEPARABILITY = "separability"
_SAVES: dict[str, Save] = {"recompute": "nothing", "selective": "matmuls"}


def preset(text: str, program: StepProgram, ranks: int | None = None, precision: Precision | None = None) -> Plan:
    """The plan that a preset names, for this program. Raises E0307 for words it does not know, sizes that
    do not fit the ranks, or axes named twice."""
    text, schedule = _take(_SCHEDULE, text)
    text, policy = _take(_NUMERICS, text)
    text, meaning = _take(_SEPARABILITY, text)
    sizes, flags = _parse(text, ranks)
    batch = tuple(axis for axis in ("replica", "data") if any(_AXES[w] == axis for w in sizes))
    pipeline = _pipeline(text, sizes, flags, schedule, program)
    mesh_axes: list[tuple[str, int]] = [(PIPE, sizes["pp"])] if pipeline is not None else []
    mesh_axes += [(_AXES[w], n) for axis in batch for w, n in sizes.items() if _AXES[w] == axis]
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
    said_apart = ((_SCHEDULE, schedule), (_NUMERICS, policy), (_SEPARABILITY, meaning))
    return Plan(
        mesh=Mesh(tuple(mesh_axes)),
        batch=batch,
        microbatches=flags.get("micro", 1),
        storage=storage,
        sequence=tensor if "sp" in flags else (),
        parameters=parameters,
        precision=precision or Precision(),
        numerics=_policy(policy),
        recompute=_recompute(flags, program),
        offload=("state",) if "offload" in flags else (),
        prefetch=flags.get("prefetch", 0),
        separability=declarations(meaning or None),
        pipeline=pipeline,
        hashes=Hashes(model=program.fingerprint, torch=torch.__version__),
        name=",".join(filter(None, [text, *(f"{word}={said}" for word, said in said_apart if said)])),
    )


def _policy(word: str) -> Numerics:
    """The policy of that name; the default one if none is said. Raises E0307 for one that is unknown."""
    for policy in POLICIES:
        if word == policy:
            return policy
    if word:
        raise error("E0307", f"unknown policy '{word}' of numerics", None, suggestion(word, POLICIES))
    return "warn"


def _take(word: str, text: str) -> tuple[str, str]:
    """The text without the word ``word=...``, and what it says; empty if it is not there."""
    found = re.search(rf"(?:^|(?<=,))\s*{word}\s*=\s*([\w-]+)\s*(?:,|$)", text)
    if found is None:
        return text, ""
    rest = (part.strip(" ,") for part in (text[: found.start()], text[found.end() :]))
    return ",".join(filter(None, rest)), found[1]


def _pipeline(
    text: str, sizes: dict[str, int], flags: dict[str, int], schedule: str, program: StepProgram
) -> Pipeline | None:
    """What ``pp``, ``schedule`` and ``virtual`` ask for. Raises E0307 for the latter two without the first, E0501 and
    E0502 for stages that there cannot be."""
    if sizes.get("pp", 1) == 1:
        for word in ([_SCHEDULE] if schedule else []) + (["virtual"] if "virtual" in flags else []):
            raise error("E0307", f"'{word}' needs 'pp': it says how a pipeline runs", None, "add pp=2, say")
        return None
    name = schedule or "1f1b"
    return pipeline_of(program, sizes["pp"], name, flags.get("virtual") or catalogue.virtual(name))


def _recompute(flags: dict[str, int], program: StepProgram) -> tuple[Recompute, ...]:
    """An entry for each kind of block of the program. Raises E0307 if it has none."""
    for word, save in _SAVES.items():
        if word in flags:
            entries = at_every_block(program.micro, Recompute("", save, flags[word]))
            if not entries:
                message, action = f"'{word}': the program has no repeated blocks", f"leave '{word}' out"
                raise error("E0307", message, None, action)
            return entries
    return ()


def _parse(text: str, ranks: int | None) -> tuple[dict[str, int], dict[str, int]]:
    sizes: dict[str, int] = {}
    flags: dict[str, int] = {}
    open_word = ""
    for item in _items(text):
        word, number = _word_and_number(item)
        if word in sizes or word in flags or (word in _AXES and _AXES[word] in {_AXES[w] for w in sizes}):
            raise error("E0307", f"the preset '{text}' names the axis of '{word}' twice", None, "name each axis once")
        if word in _FLAGS:
            flags[word] = number
        elif number:
            sizes[word] = number
        else:
            if open_word:
                raise error("E0307", f"both '{open_word}' and '{word}' leave their sizes out", None, "give one a size")
            open_word = word
            sizes[word] = 0
    if not sizes:
        flag_words = [f"{flag}={n}" if flag == "micro" or n > 1 else flag for flag, n in flags.items()]
        words = ",".join(["tp" if "sp" in flags else "fsdp", *flag_words])
        action = f"write {words}" if flags else "write fsdp, or ddp=2,tp=2"
        raise error("E0307", f"the preset '{text}' names no axis", None, action)
    _fit(text, sizes, open_word, ranks)
    if flags.keys() >= _SAVES.keys():
        message = "'recompute' and 'selective' exclude each other: both say what blocks keep"
        raise error("E0307", message, None, "leave one of the two out")
    if "sp" in flags and "tp" not in sizes:
        raise error("E0307", "'sp' needs 'tp': it cuts activations over the tensor axis", None, "add tp=2, say")
    return sizes, flags


def _items(text: str) -> list[str]:
    """The words of a preset, each with its number if it has one. Raises E0307 if no comma is between two."""
    items = [item for item in (re.sub(r"\s*=\s*", "=", i.strip()) for i in re.split("[,*]", text)) if item]
    parts = [part for item in items for part in re.split(r"[\s;+&]+", item) if part]
    if parts != items:
        message = f"words of the preset '{text}' are not separated by commas"
        raise error("E0307", message, None, f"write {','.join(parts)}" if parts else "write fsdp, or ddp=2,tp=2")
    return items


def _word_and_number(item: str) -> tuple[str, int]:
    """A word that is known, and its number; 0 if it has none."""
    word, equals, number = _in_words_of_the_field(item).partition("=")
    if word == _SCHEDULE:
        raise error("E0307", f"'{item}' needs the name of a schedule", None, "write schedule=1f1b, say")
    if word == _NUMERICS:
        raise error("E0307", f"'{item}' needs a policy", None, "write numerics=safe, say")
    if word == _SEPARABILITY:
        message = f"'{item}' needs what couplings of samples mean"
        raise error("E0307", message, None, "write separability=global, say")
    if word not in _AXES and word not in _FLAGS:
        known = [*_AXES, *_FLAGS, _SCHEDULE, _NUMERICS]
        raise error("E0307", f"'{word}' is not a word of a preset", None, suggestion(word, known))
    if word == "sp" and equals:
        raise error("E0307", f"'{item}': sp takes no number, it follows tp", None, "write sp")
    if word == "offload" and equals:
        raise error("E0307", f"'{item}': offload takes no number", None, "write offload")
    if word == "micro" and not number:
        raise error("E0307", "'micro' needs the number of microbatches", None, "write micro=4, say")
    if equals and not re.fullmatch("0*[1-9][0-9]{0,8}", number):
        raise error("E0307", f"'{item}' needs a positive whole number", None, f"write {word}=2, say")
    return word, int(number or (1 if word in _NUMBERED else 0))


def _in_words_of_the_field(item: str) -> str:
    """``recompute=selective`` as ``selective``, ``recompute=full/2`` as ``recompute=2``; anything else as it is."""
    found = re.fullmatch(r"recompute=(selective|full)(?:/(.+))?", item)
    if found is None:
        return item
    word = "selective" if found[1] == "selective" else "recompute"
    return f"{word}={found[2]}" if found[2] else word


def _fit(text: str, sizes: dict[str, int], open_word: str, ranks: int | None) -> None:
    """Give the word without a size the ranks that the others leave. Raises E0307 if the sizes do not fit."""
    given = math.prod(n for n in sizes.values() if n)
    if open_word and ranks is None:
        message = f"'{open_word}' has no size, and the number of ranks is not known"
        raise error("E0307", message, None, f"give a size ({open_word}=4) or the number of ranks")
    if open_word and ranks is not None:
        if ranks % given:
            message = f"'{open_word}' cannot get a size: {ranks} ranks cannot be divided by {given}"
            raise error("E0307", message, None, f"choose sizes whose product is {ranks}")
        sizes[open_word] = ranks // given
    elif ranks is not None and given != ranks:
        action = f"start {given} ranks, or choose sizes whose product is {ranks}"
        raise error("E0307", f"the preset '{text}' is for {given} ranks, not {ranks}", None, action)
