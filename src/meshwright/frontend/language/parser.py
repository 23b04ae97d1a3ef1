"""From the text of a `.mw` file to its syntax tree. Faults of syntax become E01xx errors."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import ClassVar

from lark import Lark, UnexpectedInput
from lark.exceptions import VisitError
from lark.indenter import DedentError, Indenter

from meshwright.compiler.diagnostics import MeshwrightError, Span, error
from meshwright.frontend.language import tree
from meshwright.frontend.language.syntax_errors import dedent_error, syntax_error
from meshwright.frontend.language.tree_builder import TreeBuilder


class Indentation(Indenter):
    """Turns the width of line starts into _INDENT and _DEDENT; brackets suspend it."""

    NL_type = "_NL"
    OPEN_PAREN_types: ClassVar[list[str]] = ["LPAR", "LSQB"]
    CLOSE_PAREN_types: ClassVar[list[str]] = ["RPAR", "RSQB"]
    INDENT_type = "_INDENT"
    DEDENT_type = "_DEDENT"
    tab_len = 4


@cache
def _lark() -> Lark:
    grammar = (files("meshwright.frontend.language") / "grammar.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", lexer="contextual", postlex=Indentation(), propagate_positions=True)


def parse(text: str, path: str) -> tree.File:
    """The syntax tree of ``text``; ``path`` is what errors call the file."""
    whole = text + "\n"
    lines = text.splitlines()
    try:
        parsed = _lark().parse(whole)
    except UnexpectedInput as fault:
        raise syntax_error(fault, path, lines) from None
    except DedentError as fault:
        raise dedent_error(fault, path, lines) from None
    try:
        sections = TreeBuilder(path, lines).transform(parsed)
    except VisitError as fault:
        if isinstance(fault.orig_exc, MeshwrightError):
            raise fault.orig_exc from None
        raise
    return _file(path, lines, sections)


def _file(path: str, lines: list[str], sections: list[tree.Section]) -> tree.File:
    """Sections by kind; each but ``use`` and ``def`` at most once, and a model there must be."""
    once: dict[str, tree.Section] = {}
    uses, functions = [], []
    for section in sections:
        if isinstance(section, tree.Use):
            uses.append(section)
        elif isinstance(section, tree.Function) and not section.is_model:
            functions.append(section)
        else:
            kind = "model" if isinstance(section, tree.Function) else type(section).__name__.lower()
            if kind in once:
                raise error(
                    "E0106",
                    f"a second '{kind}' section",
                    section.span,
                    f"join it with the one in line {once[kind].span.line}",
                )
            once[kind] = section
    for kind, needed in (("axes", "the names and sizes of its axes"), ("model", "what is computed")):
        if kind not in once:
            first = Span(path, 1, 1, text=lines[0] if lines else "")
            raise error(
                "E0107",
                f"the file has no '{kind}' section",
                first,
                f"add '{kind}', which says {needed}",
            )
    return tree.File(path, tuple(uses), functions=tuple(functions), **once)  # type: ignore[arg-type]  # by kind
