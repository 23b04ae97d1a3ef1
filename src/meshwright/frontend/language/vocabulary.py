"""Which table the model looks its input up in: the bound of the tokens that may be fed to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.frontend.language import tree


def lookup_axis(function: tree.Function, name: str, functions: Mapping[str, tree.Function]) -> str | None:
    """The first axis of the table that input ``name`` of ``function`` indexes, through calls; None if there is none."""
    shapes = {i.name.name: i.shape.names for i in function.inputs}
    for statement in _statements(function.body):
        if isinstance(statement, tree.Param):
            shapes.update({d.name.name: d.shape.names for d in statement.declared})
    for statement in _statements(function.body):
        if isinstance(statement, tree.Param | tree.Repeat):
            continue
        for part in _parts(statement.value):
            match part:
                case tree.Lookup(tree.Name(table), tree.Name(index)) if index == name and shapes.get(table):
                    return shapes[table][0]
                case tree.Call(word, arguments) if word.name in functions:
                    called = functions[word.name]
                    for argument, declared in zip(arguments, called.inputs, strict=False):
                        if isinstance(argument.value, tree.Name) and argument.value.name == name:
                            found = lookup_axis(called, declared.name.name, functions)
                            if found is not None:
                                return found
    return None


def _statements(body: tuple[tree.Statement, ...]) -> Iterator[tree.Statement]:
    for statement in body:
        yield statement
        if isinstance(statement, tree.Repeat):
            yield from _statements(statement.body)


def _parts(expression: tree.Expression) -> Iterator[tree.Expression]:
    """The expression and everything inside it."""
    yield expression
    match expression:
        case tree.Paren(inner) | tree.Negative(inner) | tree.Arrow(inner):
            yield from _parts(inner)
        case tree.Binary(_, left, right) | tree.Lookup(left, right):
            yield from _parts(left)
            yield from _parts(right)
        case tree.Call(_, arguments):
            for argument in arguments:
                yield from _parts(argument.value)
