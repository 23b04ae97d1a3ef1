"""Which ops of the forward pass the recompute entries of a plan name, and what is to be kept of them.

A *block* here is a repeated region as capture marks it (``model.layers.3``; blocks within blocks, such as the experts
of a layer, are blocks too), or a module within a block (``model.layers.3.mlp``). A pattern that fits a block takes all
that is in it, blocks within it included. Of blocks around one op that a pattern fits, the outermost counts; of several
entries the first one that fits any. What stands in no block (embedding, head, loss) is taken by the full
name of its module alone, so that ``**`` means all blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.compiler.graph.program import Graph, annotation
from meshwright.compiler.plan import Recompute, Save, pattern_expression


def treated(graph: Graph, entries: Sequence[Recompute]) -> dict[fx.Node, tuple[str, Save]]:
    """By node of the forward pass that some entry treats: its block, and what of that block is kept.

    Blocks that keep everything are left out. Raises E0335 for a pattern that fits no block.
    """
    regions = _Regions(graph)
    _check(entries, regions)
    found = {node: regions.entry(node, entries) for node in regions.nodes}
    order: list[dict[str, int]] = [{} for _ in entries]
    result: dict[fx.Node, tuple[str, Save]] = {}
    for node, match in found.items():
        if match is None:
            continue
        index, block = match
        number = order[index].setdefault(block, len(order[index]))
        entry = entries[index]
        if entry.save != "all" and number % entry.every == 0:
            result[node] = (block, entry.save)
    return result


def treatments(graph: Graph, entries: Sequence[Recompute]) -> dict[str, Save]:
    """By block that an entry treats: what of it is kept. ``graph`` is the micro graph of a step."""
    return dict(treated(graph, entries).values())


def one_by_one(graph: Graph, entries: Sequence[Recompute]) -> tuple[Recompute, ...]:
    """The same in entries of one block each. For a folded program, whose blocks are counted differently."""
    return tuple(Recompute(block, save) for block, save in treatments(graph, entries).items())


def present(graph: Graph, entries: Iterable[Recompute]) -> tuple[Recompute, ...]:
    """The entries that fit something in a graph: of those for a whole program, what its folded form needs."""
    regions = _Regions(graph)
    return tuple(entry for entry in entries if any(regions.fits(entry, key) for key in regions.keys))


def without_effect(entries: Iterable[Recompute]) -> bool:
    """Whether the entries leave every block as it is."""
    return all(entry.save == "all" for entry in entries)


class _Regions:
    """The blocks and modules around every op of forward, outermost first."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = [
            n for n in graph.module.graph.nodes if n.op == "call_function" and annotation(n).phase == "forward"
        ]
        self._known: dict[tuple[str, str], tuple[str, ...]] = {}
        self._free: dict[tuple[str, str], tuple[str, ...]] = {}
        self._matches: dict[tuple[str, str], tuple[int, str] | None] = {}
        for node in self.nodes:
            key = _key(node)
            if key not in self._known:
                self._known[key] = (*blocks_around(key[0]), *_prefixes(key[1], within=key[0])) if key[0] else ()
                self._free[key] = () if key[0] else _prefixes(key[1])

    def entry(self, node: fx.Node, entries: Sequence[Recompute]) -> tuple[int, str] | None:
        """The number of the entry that counts for a node, and the block in which it takes it."""
        key = _key(node)
        if key not in self._matches:
            self._matches[key] = next(
                ((i, found) for i, entry in enumerate(entries) if (found := self.fits(entry, key))), None
            )
        return self._matches[key]

    def fits(self, entry: Recompute, key: tuple[str, str]) -> str:
        """The outermost block around an op that the entry's pattern fits; empty if none does."""
        expression = pattern_expression(entry.pattern)
        block = next((name for name in self._known[key] if expression.fullmatch(name)), "")
        return block or (entry.pattern if entry.pattern in self._free[key] else "")

    @property
    def keys(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        return self._known

    @property
    def names(self) -> set[str]:
        """All that a pattern may name."""
        return {name for names in (*self._known.values(), *self._free.values()) for name in names}


def blocks_around(block: str) -> tuple[str, ...]:
    """The blocks that hold a block, outermost first, then itself: ``layers.3.experts.1`` is within ``layers.3``."""
    parts = block.split(".") if block else []
    return tuple(".".join(parts[: i + 1]) for i, p in enumerate(parts) if p.isdecimal() or i + 1 == len(parts))


def _prefixes(path: str, within: str = "") -> tuple[str, ...]:
    """The modules around a module path, outermost first, itself at the end; those within a block alone."""
    parts = path.split(".") if path else []
    found = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
    return tuple(name for name in found if not within or name.startswith(within + "."))


def _key(node: fx.Node) -> tuple[str, str]:
    note = annotation(node)
    return note.block, note.origin.module


def _check(entries: Sequence[Recompute], regions: _Regions) -> None:
    for entry in entries:
        if not any(regions.fits(entry, key) for key in regions.keys):
            blocks = {names[0] for names in regions.keys.values() if names}
            near = suggestion(entry.pattern, regions.names)
            known = ", ".join(_patterns(blocks))
            action = near if near.startswith("did") else f"the blocks are {known}" if known else "delete the entry"
            raise error("E0335", f"no block matches '{entry.pattern}'", None, action)


def _patterns(blocks: Iterable[str]) -> list[str]:
    """Names of blocks with their numbers as ``*``, each once."""
    return sorted({".".join("*" if part.isdecimal() else part for part in block.split(".")) for block in blocks})


def pattern_of_all(graph: Graph) -> tuple[str, ...]:
    """Patterns that together name every outermost block of a graph (``model.layers.*``)."""
    labels = {annotation(n).block for n in graph.module.graph.nodes} - {""}
    return tuple(_patterns({blocks_around(label)[0] for label in labels}))


def at_every_block(graph: Graph, entry: Recompute) -> tuple[Recompute, ...]:
    """The entry for every outermost block, whatever its own pattern is."""
    return tuple(replace(entry, pattern=pattern) for pattern in pattern_of_all(graph))
