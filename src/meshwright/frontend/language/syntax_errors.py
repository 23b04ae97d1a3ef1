"""What the parser stumbled over, told as one E01xx error: what stands there, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Iterable

from lark import Token, UnexpectedCharacters, UnexpectedInput, UnexpectedToken
from lark.indenter import DedentError

from meshwright.compiler.diagnostics import MeshwrightError, Span, error, nearest

_WORDS = {
    "NAME": "a name",
    "NUMBER": "a number",
    "STRING": 'a "text"',
    "_NL": "the end of the line",
    "_INDENT": "an indented line",
    "_DEDENT": "the end of the indented lines",
    "$END": "the end of the file",
}

_MARKS = {
    "LPAR": "(",
    "RPAR": ")",
    "LSQB": "[",
    "RSQB": "]",
    "COMMA": ",",
    "COLON": ":",
    "EQUAL": "=",
    "PLUS": "+",
    "MINUS": "-",
    "STAR": "*",
    "SLASH": "/",
    "TILDE": "~",
    "DOT": ".",
    "__ANON_0": "->",
    "__ANON_1": "**",
}

_OPERATORS = {"PLUS", "MINUS", "STAR", "SLASH", "__ANON_1", "DOT"}


def syntax_error(fault: UnexpectedInput, path: str, lines: list[str]) -> MeshwrightError:
    """The error for what lark raised."""
    expected = _expected(fault)
    if isinstance(fault, UnexpectedCharacters):
        span = _span(path, lines, fault.line, fault.column, 1)
        if fault.char == '"':
            return error("E0104", "the text is not closed", span, 'close it with " on the same line')
        action = "remove it; the operators are + - * / **"
        return error("E0104", f"the character '{fault.char}' has no meaning here", span, action)
    if not isinstance(fault, UnexpectedToken):
        return error("E0101", "the file ends too early", _end(path, lines), _instead(expected))
    token = fault.token
    if token.type == "$END" or (token.type == "_NL" and _open_bracket(lines, len(lines))):
        return _ends_early(path, lines, expected)
    if token.type == "_INDENT":
        where = _line(path, lines, token)
        action = "give it the indentation of that line"
        return error("E0103", "this line is indented deeper than the one above", where, action)
    if token.type == "_DEDENT" or (expected == {"_INDENT"}):
        where = _line(path, lines, token)
        return error(
            "E0103", "an indented line is expected here", where, "indent the lines that belong to the header above"
        )
    if token.type == "_NL":
        line = token.line or 1
        where = _span(path, lines, line, len(lines[line - 1].split("#")[0].rstrip()) + 1, 1)
        return error("E0101", "the line ends too early", where, _instead(expected))
    return _unexpected(token, path, lines, expected)


def dedent_error(fault: DedentError, path: str, lines: list[str]) -> MeshwrightError:
    """A line that falls back to a column where no block began."""
    line, column = _bad_dedent(lines)
    span = _span(path, lines, line, column, 1)
    return error("E0103", "this line is aligned with no line above it", span, "align it with the block it belongs to")


def _unexpected(token: Token, path: str, lines: list[str], expected: set[str]) -> MeshwrightError:
    where = _span(path, lines, token.line or 1, token.column or 1, len(token))
    opened = _open_bracket(lines, token.line or 1, token.column or 1)
    first = token.column == 1 + len(where.text) - len(where.text.lstrip())
    if opened and first and opened[0] < where.line:
        line, column = opened
        mark = lines[line - 1][column - 1]
        return error("E0105", f"'{mark}' is never closed", _span(path, lines, line, column, 1), f"close '{mark}'")
    words = {name.lower() for name in expected if name.isalpha() and name not in _WORDS and name not in _MARKS}
    if words and token.type not in _MARKS and not expected & {"NUMBER"} and len(words) > 1:
        kind = "section" if words & {"axes", "train"} else "setting"
        close = nearest(str(token), words)
        help_ = f"did you mean '{close}'?" if close else "expected one of: " + ", ".join(sorted(words))
        return error("E0102", f"unknown {kind} '{token}'", where, help_)
    if token.type == "COMMA" and expected == {"NAME", "RSQB"}:
        return error("E0101", "',' is unexpected between axes", where, "separate axes by spaces: '[b t d]'")
    return error("E0101", f"'{token}' is unexpected here", where, _instead(expected, str(token)))


def _ends_early(path: str, lines: list[str], expected: set[str]) -> MeshwrightError:
    opened = _open_bracket(lines, len(lines))
    if opened:
        line, column = opened
        mark = lines[line - 1][column - 1]
        return error("E0105", f"'{mark}' is never closed", _span(path, lines, line, column, 1), f"close '{mark}'")
    return error("E0101", "the file ends too early", _end(path, lines), _instead(expected))


def _expected(fault: UnexpectedInput) -> set[str]:
    if isinstance(fault, UnexpectedToken):
        accepts = getattr(fault, "accepts", None)
        return set(accepts or fault.expected)
    if isinstance(fault, UnexpectedCharacters):
        return set(fault.allowed or ())
    return set()


def _instead(expected: Iterable[str], found: str = "") -> str:
    """``write ',' or ')'``: what the grammar accepts, shortest useful form."""
    names = set(expected)
    if {"NAME", "NUMBER", "LPAR"} <= names:
        return "write a value: a name, a number, a call or a bracket"
    closing = names - _OPERATORS or names
    marks = {f"'{_MARKS[n]}'" for n in closing if n in _MARKS}
    texts = [_WORDS[n] for n in ("NAME", "NUMBER", "STRING", "_NL", "_INDENT") if n in closing]
    words = {f"'{n.lower()}'" for n in closing if n not in _MARKS and n not in _WORDS}
    close = nearest(found, {w.strip("'") for w in words}) if found else None
    if close:
        return f"did you mean '{close}'?"
    choices = texts + sorted(marks) + sorted(words)
    return "write " + " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)


def _open_bracket(lines: list[str], last: int, column: int | None = None) -> tuple[int, int] | None:
    """The innermost bracket still open before the place given."""
    stack: list[tuple[int, int]] = []
    for number, text in enumerate(lines[:last], 1):
        code = _without_text(text.split("#")[0])
        for position, char in enumerate(code, 1):
            if number == last and column is not None and position >= column:
                break
            if char in "([":
                stack.append((number, position))
            elif char in ")]" and stack:
                stack.pop()
    return stack[-1] if stack else None


def _without_text(code: str) -> str:
    """The line with quoted texts blanked out."""
    inside, result = False, []
    for char in code:
        inside ^= char == '"'
        result.append(" " if inside else char)
    return "".join(result)


def _bad_dedent(lines: list[str]) -> tuple[int, int]:
    """The first line whose indentation matches no open block."""
    levels = [0]
    for number, text in enumerate(lines, 1):
        body = text.expandtabs(4)
        if not body.strip() or body.lstrip().startswith("#"):
            continue
        width = len(body) - len(body.lstrip())
        if width > levels[-1]:
            levels.append(width)
        while width < levels[-1]:
            levels.pop()
        if width != levels[-1]:
            return number, len(text) - len(text.lstrip()) + 1
    return len(lines), 1


def _line(path: str, lines: list[str], token: Token) -> Span:
    """The first written line at or after the line break ``token``."""
    number = (token.line or 1) + (1 if token.type == "_NL" or not str(token).strip() else 0)
    while number < len(lines) and not lines[number - 1].split("#")[0].strip():
        number += 1
    number = min(max(number, 1), max(len(lines), 1))
    text = lines[number - 1] if lines else ""
    start = len(text) - len(text.lstrip()) + 1
    return _span(path, lines, number, start, len(text.split("#")[0].strip()) or 1)


def _end(path: str, lines: list[str]) -> Span:
    number = max(len(lines), 1)
    return _span(path, lines, number, (len(lines[-1]) if lines else 0) + 1, 1)


def _span(path: str, lines: list[str], line: int, column: int, length: int) -> Span:
    line, column = max(line, 1), max(column, 1)
    text = lines[line - 1] if 0 < line <= len(lines) else ""
    return Span(path, line, column, length, text)
