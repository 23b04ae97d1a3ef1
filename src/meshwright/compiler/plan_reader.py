"""Reads the tables of a plan's TOML form, and gathers every fault with its line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, Span, suggestion
from meshwright.compiler.mesh import MICRO, Mesh, Sharding, parse_sharding
from meshwright.compiler.pipeline_reader import read_pipeline
from meshwright.compiler.plan import Hashes, ParameterPlan, Plan, Precision, Storage
from meshwright.compiler.prediction_text import PREDICTED, read_predicted, read_reasons
from meshwright.compiler.recompute_reader import read_numerics, read_offload, read_prefetch, read_recompute
from meshwright.compiler.separability_text import read_separability
from meshwright.compiler.toml_text import TomlText

DTYPES = ("fp64", "fp32", "bf16", "fp16")
"""The dtypes that a plan's precision may name."""

TABLES: dict[str, dict[str, type]] = {
    "": {"name": str, "batch": list, "sequence": list, "microbatches": int, "mesh": dict, "storage": dict,
         "precision": dict, "numerics": str, "parameters": list, "recompute": list, "offload": list, "prefetch": int,
         "pipeline": dict, "separability": dict, "made_for": dict, "predicted": dict, "reasons": list},
    "storage": {"parameters": list, "gradients": list, "state": list},
    "precision": {"compute": str, "weights": str, "reduce": str},
    "made_for": {"model": str, "torch": str, "cluster": str, "outline": str},
    "parameters": {"pattern": str, "compute": str, "rest": str, "gradient": str, "state": str},
    "recompute": {"pattern": str, "save": str, "every": int},
    "pipeline": {"schedule": str, "first_blocks": list, "table": str},
    **PREDICTED,
}  # fmt: skip
_TYPES = {str: "a text in quotes", list: "a list", int: "a whole number", float: "a number", dict: "a table"}


@dataclass
class PlanReader:
    """Reads the tables of one document and gathers what is wrong."""

    toml: TomlText

    def __post_init__(self) -> None:
        self.faults: list[Diagnostic] = []
        self.mesh: dict[str, int] = {}

    def plan(self) -> Plan:
        top = self.table("", self.toml.values, ())
        self.mesh = self._mesh(top.get("mesh"))
        plan = Plan(
            mesh=Mesh(tuple(self.mesh.items())),
            batch=self._axes(top, ("batch",)),
            microbatches=self._microbatches(top),
            storage=Storage(**self._section(top, "storage", self._axes)),
            sequence=self._axes(top, ("sequence",)),
            parameters=self._parameters(top.get("parameters", [])),
            precision=Precision(**self._section(top, "precision", self._dtype)),
            numerics=read_numerics(self, top.get("numerics", "warn")),
            recompute=read_recompute(self, top.get("recompute", [])),
            offload=read_offload(self, top.get("offload", [])),
            prefetch=read_prefetch(self, top.get("prefetch", 0)),
            separability=read_separability(self, top.get("separability", {})),
            pipeline=read_pipeline(self, top.get("pipeline"), self.mesh),
            hashes=Hashes(**self._section(top, "made_for", lambda table, path: table[path[-1]])),
            name=top.get("name", ""),
            predicted=read_predicted(self, top.get("predicted")),
            reasons=read_reasons(self, top.get("reasons", [])),
        )
        if self.faults:
            raise MeshwrightError(*_once(sorted(self.faults, key=_line)))
        return plan

    def fault(self, code: str, message: str, place: Span, action: str) -> None:
        self.faults.append(Diagnostic(code, message, place, action))

    def table(self, kind: str, table: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
        """The entries of a table of that kind that are known and of the right type."""
        known = TABLES[kind]
        good = {}
        for key, value in table.items():
            if key not in known:
                where = f"in [{kind}]" if kind else "in a plan"
                self.fault("E0312", f"unknown key '{key}' {where}", self.toml.key(*path, key), suggestion(key, known))
            elif not isinstance(value, known[key]) or isinstance(value, bool):
                self.fault(
                    "E0313",
                    f"'{key}' must be {_TYPES[known[key]]}",
                    self.toml.value(*path, key),
                    f"write {key} = {_written((kind, key), known[key], value)}",
                )
            else:
                good[key] = value
        return good

    def _section(self, top: dict[str, Any], kind: str, read: Any) -> dict[str, Any]:
        table = self.table(kind, top.get(kind, {}), (kind,))
        return {key: read(table, (kind, key)) for key in table}

    def _mesh(self, table: dict[str, Any] | None) -> dict[str, int]:
        if not table:
            place = self.toml.key("mesh")
            self.fault(
                "E0314", "the plan has no mesh", place, "add a table [mesh] with one line per axis, such as data = 4"
            )
            return {}
        good = {}
        for axis, size in table.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                self.fault(
                    "E0318",
                    f"mesh axis '{axis}' must have a whole number of ranks of at least 1",
                    self.toml.value("mesh", axis),
                    f"write {axis} = 2",
                )
            if axis == MICRO:
                self.fault(
                    "E0318",
                    f"'{MICRO}' is the name of the microbatch axis and no mesh axis",
                    self.toml.key("mesh", axis),
                    "set microbatches = ... instead, or give the axis another name",
                )
            elif not axis.isidentifier():
                self.fault(
                    "E0318",
                    f"'{axis}' is no name of a mesh axis",
                    self.toml.key("mesh", axis),
                    "use letters, digits and _, beginning with a letter",
                )
            good[axis] = size if isinstance(size, int) and size >= 1 else 1
        return good

    def _microbatches(self, top: dict[str, Any]) -> int:
        count: int = top.get("microbatches", 1)
        if count < 1:
            self.fault(
                "E0319",
                f"microbatches is {count}",
                self.toml.value("microbatches"),
                "give a whole number of at least 1",
            )
        return count

    def _axes(self, table: dict[str, Any], path: tuple[str, ...]) -> tuple[str, ...]:
        """A list of mesh axes, each in the mesh and named once."""
        found = table.get(path[-1], [])
        if not all(isinstance(axis, str) for axis in found):
            self.fault("E0313", f"'{path[-1]}' must be a list of axis names", self.toml.value(*path), 'write ["data"]')
            return ()
        self._check_axes(found, path, f"'{path[-1]}'")
        return tuple(found)

    def _check_axes(self, axes: Iterable[str], path: tuple[str | int, ...], what: str) -> None:
        seen: list[str] = []
        for axis in axes:
            place = self.toml.value(*path, piece=axis, occurrence=seen.count(axis))
            if axis in seen:
                self.fault(
                    "E0316",
                    f"axis '{axis}' cuts {what} twice",
                    place,
                    "an axis can cut one tensor once; name it in one place only",
                )
            elif axis not in self.mesh:
                hint = suggestion(axis, self.mesh) if self.mesh else "name the axes in [mesh]"
                self.fault("E0315", f"axis '{axis}' is not in the mesh", place, hint)
            seen.append(axis)

    def _dtype(self, table: dict[str, Any], path: tuple[str, ...]) -> str:
        name: str = table[path[-1]]
        if name not in DTYPES:
            self.fault("E0321", f"unknown precision '{name}'", self.toml.value(*path), suggestion(name, DTYPES))
        return name

    def _parameters(self, entries: list[Any]) -> tuple[ParameterPlan, ...]:
        plans: list[ParameterPlan] = []
        seen: set[str] = set()
        for index, entry in enumerate(entries):
            path = ("parameters", index)
            if not isinstance(entry, dict):
                self.fault(
                    "E0313",
                    "'parameters' must be tables",
                    self.toml.value("parameters"),
                    "write [[parameters]] and the entries below it",
                )
                return ()
            table = self.table("parameters", entry, path)
            for key in ("pattern", "compute"):
                if key not in entry:
                    self.fault("E0314", f"this entry has no '{key}'", self.toml.key(*path), f'add {key} = "..."')
            shardings = {key: self._sharding(table[key], (*path, key)) for key in table if key != "pattern"}
            pattern = table.get("pattern", "")
            if pattern in seen:
                self.fault(
                    "E0320",
                    f"'{pattern}' has two entries; this one never counts",
                    self.toml.value(*path, "pattern"),
                    "delete one of the two",
                )
            seen.add(pattern)
            compute = shardings.pop("compute", None)
            for key, sharding in shardings.items():
                if compute and sharding and sharding.shape != compute.shape:
                    self.fault(
                        "E0322",
                        f"'{key}' has the sizes {_sizes(sharding)}, 'compute' has {_sizes(compute)}",
                        self.toml.value(*path, key),
                        "a parameter has the same sizes everywhere; only its axes differ",
                    )
            plans.append(ParameterPlan(pattern, compute or Sharding(()), **shardings))
        return tuple(plans)

    def _sharding(self, text: str, path: tuple[str | int, ...]) -> Sharding | None:
        try:
            sharding = parse_sharding(text)
        except ValueError as fault:
            piece = str(fault).split("'")[1]
            self.fault(
                "E0317",
                f"malformed sharding: {fault}",
                self.toml.value(*path, piece=piece),
                'write "[1024@tensor, 768]": sizes, each with the axes that cut it',
            )
            return None
        for _, _, segment in sharding.segments():
            if segment.size < 1:
                self.fault(
                    "E0322",
                    f"a dimension of size {segment.size}",
                    self.toml.value(*path, piece=str(segment)),
                    "sizes are at least 1",
                )
        self._check_axes([axis for _, _, segment in sharding.segments() for axis in segment.axes], path, "this tensor")
        self._check_axes(sorted(sharding.owed - sharding.axes), path, "this tensor")
        if sharding.partial and path[-1] != "gradient":
            axis = min(sharding.owed)
            self.fault(
                "E0317",
                f"a parameter owes no sum, only its gradient may ('+{axis}')",
                self.toml.value(*path, piece=f"+{axis}"),
                f"delete +{axis}",
            )
        return sharding


_LISTED = {
    ("pipeline", "first_blocks"): '["layers.2"]',
    ("", "offload"): '["state"]',
    ("", "parameters"): '[{ pattern = "...", compute = "..." }]',
    ("", "recompute"): '[{ pattern = "..." }]',
    ("", "reasons"): '["..."]',
}
"""By table and key: lists that are no lists of axes, as they are written."""
_EXAMPLES = {str: '"..."', list: '["data"]', int: "2", float: "0.5", dict: "{ ... } or a table of its own"}


def _written(key: tuple[str, str], kind: type, value: object) -> str:
    """How a value of that kind is written: one text in place of a list of them is the list of that text."""
    if kind is list and isinstance(value, str) and "{" not in _LISTED.get(key, ""):
        return f"[{json.dumps(value, ensure_ascii=False)}]"
    return _LISTED.get(key, _EXAMPLES[kind]) if kind is list else _EXAMPLES[kind]


def _line(fault: Diagnostic) -> tuple[int, int]:
    return (fault.place.line, fault.place.column) if isinstance(fault.place, Span) else (0, 0)


def _once(faults: list[Diagnostic]) -> list[Diagnostic]:
    """Each fault at its first place, with the number of further ones; one misspelt axis is one fault."""
    alike: dict[tuple[str, str], list[Diagnostic]] = {}
    for fault in faults:
        # other faults of one message (an unknown key, say) are each to be corrected by itself
        alike.setdefault((fault.code, fault.message if fault.code == "E0315" else str(id(fault))), []).append(fault)
    return [
        replace(first, notes=(*first.notes, f"the same at {_places(rest)}")) if rest else first
        for first, *rest in alike.values()
    ]


def _places(faults: list[Diagnostic]) -> str:
    """``line 4`` or ``12 further places, the last in line 80``."""
    last = _line(faults[-1])[0]
    return f"line {last}" if len(faults) == 1 else f"{len(faults)} further places, the last in line {last}"


def _sizes(sharding: Sharding) -> str:
    return "[" + ", ".join(map(str, sharding.shape)) + "]"
