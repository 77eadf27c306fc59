"""What a test makes of a text that it has put together, or that the solution gave back: ``eval(f"{x} + 1")``.

Never the solution's `eval`, which may be its own. A text that names something of the solution is read here: its calls
are the solution's to answer, all else is done here. Any other text is run in a fresh process that knows nothing. Sent
into the sandbox beside the judge.
"""

import ast
import keyword
import operator
import re

from remote import Handle

_PAIRS = (
    "Add:add Sub:sub Mult:mul Div:truediv FloorDiv:floordiv Mod:mod UAdd:pos USub:neg Not:not_ "
    "Eq:eq NotEq:ne Lt:lt LtE:le Gt:gt GtE:ge"
)
_OPERATORS = {getattr(ast, node): getattr(operator, name) for node, name in (p.split(":") for p in _PAIRS.split())}
"""Functions of the operators that are evaluated here, by the class of their node."""
_LONGEST_TEXT = 10_000
"""Characters of a text that is read here."""


def parse(text):
    """The expression that a text holds; None if it is none, or long."""
    try:
        return ast.parse(text.strip(), mode="eval").body if len(text) <= _LONGEST_TEXT else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


_HARMLESS = re.compile(r"[-+]?\d+(\.\d*)?|[-+*/%]|\*\*|//|[^\W\d]\w*")


def is_whole(text, node, parts):
    """Whether each of `parts` that stands in the text is an expression there by itself, a string's content, or a
    number, a name or a sign of arithmetic: ``5 == 5 or 0`` is none in ``5 == 5 or 0 == 7``, of which it decides."""
    parts = {part.strip() for part in parts} - {text.strip()}
    parts = [part for part in parts if part in text and not _is_harmless(part)]
    if not parts:
        return True
    if node is None:  # not an expression, which is what it fails with
        return len(text) <= _LONGEST_TEXT
    if not text.isascii() or any(isinstance(inner, ast.JoinedStr) for inner in ast.walk(node)):
        return False
    text = text.strip()
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    spans, strings = set(), []
    for inner in ast.walk(node):
        if isinstance(inner, ast.expr):
            last_line, last_column = inner.end_lineno or 1, inner.end_col_offset or 0
            span = (starts[inner.lineno - 1] + inner.col_offset, starts[last_line - 1] + last_column)
            spans.add(span)
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                strings.append(span)
    return all(_stands_alone(text, part, spans, strings) for part in parts)


def _is_harmless(part):
    is_word = not keyword.iskeyword(part) or part in ("True", "False", "None")
    return is_word and _HARMLESS.fullmatch(part) is not None


def _stands_alone(text, part, spans, strings):
    """At each place where it stands."""
    start = text.find(part)
    while start >= 0:
        end = start + len(part)
        inner = _without_brackets(text, start, end)
        whole = (start, end) in spans or inner in spans
        if not whole and not any(first < start and end < last for first, last in strings):
            return False
        start = text.find(part, start + 1)
    return True


def _without_brackets(text, start, end):
    while text[start:end].startswith("(") and text[start:end].endswith(")"):
        start, end = start + 1, end - 1
    return start, end


class SolutionEvaluation:
    """`value_of(name)` gives the solution's object, `refuse(what)` the exception to raise for what cannot be read."""

    def __init__(self, value_of, refuse):
        self._value_of, self._refuse = value_of, refuse

    def of(self, node):
        """The value of an expression of constants, lists, numbers' operators, and calls of the solution's."""
        read = getattr(self, f"_{type(node).__name__.lower()}", None)
        if read is None:
            raise self._refuse("eval of such a text")
        return read(node)

    def _constant(self, node):
        return node.value

    def _name(self, node):
        return self._value_of(node.id)

    def _list(self, node):
        return [self.of(item) for item in node.elts]

    def _tuple(self, node):
        return tuple(self._list(node))

    def _attribute(self, node):
        owner = self.of(node.value)
        if not isinstance(owner, Handle):
            raise self._refuse("an attribute in a text")
        return getattr(owner, node.attr)

    def _call(self, node):
        function = self.of(node.func)
        if not isinstance(function, Handle) or any(keyword.arg is None for keyword in node.keywords):
            raise self._refuse("such a call in a text")
        return function(*map(self.of, node.args), **{each.arg: self.of(each.value) for each in node.keywords})

    def _binop(self, node):
        sides = self.of(node.left), self.of(node.right)
        if not all(isinstance(side, (int, float)) for side in sides):
            raise self._refuse("such an operator in a text")
        return self._find_function(node.op)(*sides)

    def _unaryop(self, node):
        value = self.of(node.operand)
        if isinstance(value, Handle):
            raise self._refuse("such an operator in a text")
        return self._find_function(node.op)(value)

    def _compare(self, node):
        left = self.of(node.left)
        for operation, side in zip(node.ops, node.comparators, strict=True):
            right = self.of(side)
            if not self._find_function(operation)(left, right):
                return False
            left = right
        return True

    def _find_function(self, operation):
        if type(operation) not in _OPERATORS:
            raise self._refuse("such an operator in a text")
        return _OPERATORS[type(operation)]
