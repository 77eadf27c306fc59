"""Evaluate text that a test has assembled or that the solution returned: ``eval(f"{x} + 1")``.

The solution's `eval` is never used, since the solution may have replaced it. Text that names something of the solution
is interpreted here: the solution answers its calls, and all else is computed here. Any other text runs in a fresh
process that knows nothing. Sent into the sandbox with the judge.
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
"""Functions of the supported operators, by the class of their node."""
_MAX_TEXT_CHARS = 10_000
"""Longer text is not interpreted here."""


def parse_expression(text):
    """Return the expression in `text`, or None if there is none or the text is too long."""
    try:
        return ast.parse(text.strip(), mode="eval").body if len(text) <= _MAX_TEXT_CHARS else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


_HARMLESS = re.compile(r"[-+]?\d+(\.\d*)?|[-+*/%]|\*\*|//|[^\W\d]\w*")


def has_only_whole_parts(text, node, parts):
    """Whether each of `parts` that occurs in the text is an expression, the content of a string, a number, a name or an
    arithmetic sign there. In ``5 == 5 or 0 == 7`` the part ``5 == 5 or 0`` is not: it decides the result."""
    parts = {part.strip() for part in parts} - {text.strip()}
    parts = [part for part in parts if part in text and not _is_harmless(part)]
    if not parts:
        return True
    if node is None:  # eval raises SyntaxError
        return len(text) <= _MAX_TEXT_CHARS
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
    return all(_is_isolated(text, part, spans, strings) for part in parts)


def _is_harmless(part):
    is_word = not keyword.iskeyword(part) or part in ("True", "False", "None")
    return is_word and _HARMLESS.fullmatch(part) is not None


def _is_isolated(text, part, spans, strings):
    """Whether the part is an expression or inside a string wherever it occurs."""
    start = text.find(part)
    while start >= 0:
        end = start + len(part)
        inner = _strip_brackets(text, start, end)
        whole = (start, end) in spans or inner in spans
        if not whole and not any(first < start and end < last for first, last in strings):
            return False
        start = text.find(part, start + 1)
    return True


def _strip_brackets(text, start, end):
    while text[start:end].startswith("(") and text[start:end].endswith(")"):
        start, end = start + 1, end - 1
    return start, end


class SolutionEvaluation:
    """Interpreter of expressions. `value_of(name)` returns an object of the solution, and `reject(message)` the
    exception to raise for an unsupported expression."""

    def __init__(self, value_of, reject):
        self._value_of, self._reject = value_of, reject

    def evaluate(self, node):
        """Evaluate an expression of constants, lists, operators on numbers, and calls of the solution."""
        read = getattr(self, f"_{type(node).__name__.lower()}", None)
        if read is None:
            raise self._reject(f"eval: a {type(node).__name__} is not supported in such text")
        return read(node)

    def _constant(self, node):
        return node.value

    def _name(self, node):
        return self._value_of(node.id)

    def _list(self, node):
        return [self.evaluate(item) for item in node.elts]

    def _tuple(self, node):
        return tuple(self._list(node))

    def _attribute(self, node):
        owner = self.evaluate(node.value)
        if not isinstance(owner, Handle):
            raise self._reject("eval: an attribute of plain data is not supported in such text")
        return getattr(owner, node.attr)

    def _call(self, node):
        function = self.evaluate(node.func)
        if not isinstance(function, Handle) or any(keyword.arg is None for keyword in node.keywords):
            raise self._reject("eval: such a call is not supported in such text")
        return function(*map(self.evaluate, node.args), **{k.arg: self.evaluate(k.value) for k in node.keywords})

    def _binop(self, node):
        sides = self.evaluate(node.left), self.evaluate(node.right)
        if not all(isinstance(side, (int, float)) for side in sides):
            raise self._reject("eval: an operator on such values is not supported in such text")
        return self._find_function(node.op)(*sides)

    def _unaryop(self, node):
        value = self.evaluate(node.operand)
        if isinstance(value, Handle):
            raise self._reject("eval: an operator on such values is not supported in such text")
        return self._find_function(node.op)(value)

    def _compare(self, node):
        left = self.evaluate(node.left)
        for operation, side in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(side)
            if not self._find_function(operation)(left, right):
                return False
            left = right
        return True

    def _find_function(self, operation):
        if type(operation) not in _OPERATORS:
            raise self._reject(f"eval: {type(operation).__name__} is not supported in such text")
        return _OPERATORS[type(operation)]
