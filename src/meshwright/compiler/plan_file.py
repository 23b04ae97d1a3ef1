"""The TOML form of a plan: written with comments for people, read back, checked against a model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.compiler.diagnostics import Diagnostic, Span, error
from meshwright.compiler.plan import PIPE, Hashes, Pipeline, Plan
from meshwright.compiler.plan_reader import DTYPES, TABLES, PlanReader
from meshwright.compiler.prediction_text import predicted_lines
from meshwright.compiler.separability_text import separability_entries
from meshwright.compiler.toml_text import TomlText, parse_toml


def plan_to_toml(plan: Plan) -> str:
    """The plan as TOML; :func:`read_plan` of it gives an equal plan."""
    lines = ["# A Meshwright plan: how one training step is cut over a mesh. Edit it, diff it, pass it to --plan.", ""]
    if plan.name:
        lines += [f"name = {_text(plan.name)}"]
    lines += [
        f"microbatches = {plan.microbatches}".ljust(28) + "# pieces of the global batch, computed one after another"
    ]
    lines += [f"batch = {_list(plan.batch)}".ljust(28) + "# mesh axes that cut the batch"]
    lines += [f"sequence = {_list(plan.sequence)}".ljust(28) + "# mesh axes that cut activations along time"]
    if plan.offload:
        lines += [f"offload = {_list(plan.offload)}".ljust(28) + "# kept in the host's memory between updates"]
    if plan.prefetch:
        lines += [f"prefetch = {plan.prefetch}".ljust(28) + "# blocks ahead whose stored weights are gathered"]
    if plan.numerics != "warn":
        lines += [
            f"numerics = {_text(plan.numerics)}".ljust(28) + "# of sums in half precision: safe, warn, as-written"
        ]
    if plan.reasons:
        lines += ["", "reasons = [", *(f"    {_text(reason)}," for reason in plan.reasons), "]"]
    lines += ["", "[mesh]  # axes of the cluster, outermost first"]
    lines += [f"{_key(name)} = {size}" for name, size in plan.mesh.axes]
    if plan.pipeline is not None:
        lines += _pipeline_lines(plan.pipeline)
    lines += ["", "[storage]  # mesh axes over which each kind of tensor is stored in shards"]
    lines += [f"{kind} = {_list(getattr(plan.storage, kind))}" for kind in TABLES["storage"]]
    lines += ["", f"[precision]  # {', '.join(DTYPES)}"]
    lines += [f"{kind} = {_text(getattr(plan.precision, kind))}" for kind in TABLES["precision"]]
    if plan.separability:
        lines += ["", "[separability]  # what couplings of samples mean in microbatches; the first that fits counts"]
        lines += [f"{_key(name)} = {_text(meaning)}" for name, meaning in separability_entries(plan.separability)]
    if plan.parameters:
        lines += [
            "",
            "# How parameters lie while they are computed with: [size@axis, ...]; the first pattern that fits counts.",
        ]
    for entry in plan.parameters:
        lines += ["[[parameters]]", f"pattern = {_text(entry.pattern)}", f"compute = {_text(str(entry.compute))}"]
        for kind in ("rest", "gradient", "state"):
            sharding = getattr(entry, kind)
            lines += [f"{kind} = {_text(str(sharding))}"] if sharding is not None else []
        lines += [""]
    if plan.recompute:
        lines += ([] if plan.parameters else [""]) + [
            "# What blocks keep of forward for backward, beside their inputs (nothing, matmuls, all); the rest is",
            "# computed again. Of every so many blocks that match, the first; the first pattern that fits counts.",
        ]
    for recompute in plan.recompute:
        lines += ["[[recompute]]", f"pattern = {_text(recompute.pattern)}", f"save = {_text(recompute.save)}"]
        lines += [f"every = {recompute.every}", ""]
    if plan.hashes != Hashes():
        lines += ([] if plan.parameters or plan.recompute else [""]) + ["[made_for]  # checked when the plan is used"]
        lines += [f"outline = {_text(plan.hashes.outline)}"] if plan.hashes.outline else []
        lines += [f"model = {_text(plan.hashes.model)}"] if plan.hashes.model or not plan.hashes.outline else []
        lines += [f"torch = {_text(plan.hashes.torch)}"]
        lines += [f"cluster = {_text(plan.hashes.cluster)}"] if plan.hashes.cluster else []
    if plan.predicted is not None:
        lines += ["", *predicted_lines(plan.predicted)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _pipeline_lines(pipeline: Pipeline) -> list[str]:
    lines = ["", f"[pipeline]  # the axis '{PIPE}': how blocks are cut by depth, in which order stages' passes run"]
    lines += [f"schedule = {_text(pipeline.schedule)}", "first_blocks = [  # of the stages after the first"]
    lines += [*(f"    {_text(block)}," for block in pipeline.first_blocks), "]"]
    if pipeline.table:
        lines += ["# what each rank does, a line for each", 'table = """', *pipeline.table.strip().splitlines(), '"""']
    return lines


@dataclass(frozen=True)
class PlanFile:
    """A plan and the text that it was read from, so that later faults of it can be told with their line."""

    plan: Plan
    toml: TomlText

    def located(self, fault: Diagnostic) -> Diagnostic:
        """A fault that a pass found in the plan, with its place if it has none."""
        if fault.place is not None:
            return fault
        quoted = re.findall(r"(?<!\w)'([^']*)'", f"{fault.message} {fault.action}")
        table = "recompute" if fault.code == "E0335" else "parameters"
        entries = self.plan.recompute if table == "recompute" else self.plan.parameters
        for index, pattern in enumerate(entry.pattern for entry in entries):
            if pattern in quoted:
                return replace(fault, place=self.toml.value(table, index, "pattern"))
        pipeline = self.plan.pipeline
        if pipeline is not None and fault.code in ("E0502", "E0506", "E0507"):
            if fault.code != "E0502":
                return replace(fault, place=self.toml.value("pipeline", "table"))
            block = next((name for name in quoted if name in pipeline.first_blocks), None)
            if block is not None:
                return replace(fault, place=self.toml.value("pipeline", "first_blocks", piece=block))
            return replace(fault, place=self.toml.key("pipeline"))
        if "microbatch" in fault.message and "microbatches" in self.toml.values:
            return replace(fault, place=self.toml.value("microbatches"))
        return fault


def read_plan(source: str | Path) -> Plan:
    """Read a plan from a path, or from TOML text (a ``str`` with a line break in it).

    Raises MeshwrightError with every fault that was found, each with its place.
    """
    return read_plan_file(source).plan


def read_plan_file(source: str | Path) -> PlanFile:
    """The same, with the text."""
    if isinstance(source, str) and "\n" in source:
        toml = parse_toml(source, "plan.toml", "E0311")
    else:
        toml = parse_toml(_text_of(Path(source)), str(source), "E0311")
    return PlanFile(PlanReader(toml).plan(), toml)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as fault:
        action = "give the path of a plan file, or a preset such as fsdp=2,tp=2"
        raise error("E0323", f"cannot read the plan {path}: {fault.strerror}", action=action) from None
    except UnicodeDecodeError:
        raise error("E0311", f"{path} is not a text file", action="give the path of a plan in TOML") from None


def check_made_for(
    plan: Plan, made: Hashes, place: Span | None = None, torch_place: Span | None = None
) -> list[Diagnostic]:
    """Warnings about a plan's hashes. Raises E0310 if it was made for another model.

    A plan without hashes (written by hand) fits any model. ``made`` are those of the model at hand, ``place`` is where
    the plan's hash of the model stands, ``torch_place`` where the version does. Builds of one version of torch
    (``2.13.0+cpu``) are alike.
    """
    for word, mine, other in (
        ("model", plan.hashes.model, made.model),
        ("outline", plan.hashes.outline, made.outline),
    ):
        if mine and other and mine != other:
            raise error(
                "E0310",
                "the plan was made for another model: the hash of this one is different",
                place,
                action=f"make a new plan, or delete the line '{word} = ...' under [made_for] to use it all the same",
            )
    torch = made.torch
    if plan.hashes.torch and torch and _public(plan.hashes.torch) != _public(torch):
        message = f"the plan was made with torch {plan.hashes.torch}, this is torch {torch}"
        action = f'the plan is used all the same; write torch = "{_public(torch)}" there to accept this version'
        return [Diagnostic("W0310", message, torch_place, action)]
    return []


def _public(version: str) -> str:
    """A version without its local part: ``2.13.0`` of ``2.13.0+cpu``."""
    return version.partition("+")[0]


def _text(text: str) -> str:
    """A TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def _list(items: Iterable[str]) -> str:
    return "[" + ", ".join(map(_text, items)) + "]"


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else _text(name)
