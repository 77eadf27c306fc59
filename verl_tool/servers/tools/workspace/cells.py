"""What IPython adds to Python, taken out of a cell: ``!command``, ``%magic``, ``%%magic``, ``name?``.

A cell is read line by line, as far as is needed to tell where a statement begins: nothing of it is run here, and the
time is linear in its length. Such a line is no Python: a cell without one stays as it is. Lines keep their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SHELL = "get_ipython()"
"""What runs the lines in the sandbox (`kernel.Shell`)."""
_MAYBE = re.compile(r"^[ \t]*[!%?]|=[ \t]*[!%]|\?[ \t]*$", re.MULTILINE)
_CELL_MAGIC = re.compile(r"\s*%%(?P<name>[\w!]+)[ \t]*(?P<rest>[^\n]*)(?:\n(?P<body>.*))?", re.DOTALL)
_LINE = re.compile(
    r"""(?P<indent>[ \t]*)(?:
        (?P<target>[A-Za-z_][\w.]*(?:\[[\w.'"]*\])?(?:[ \t]*,[ \t]*[A-Za-z_][\w.]*)*)
            [ \t]*=[ \t]*(?P<kind>!|%(?=[A-Za-z]))(?P<value>.*)
      | !!(?P<captured>.*)
      | !(?P<command>.*)
      | %(?P<magic>[A-Za-z_]\w*)[ \t]*(?P<rest>.*)
      | \?{1,2}[ \t]*(?P<asked>[A-Za-z_][\w.]*)[ \t]*
      | (?P<named>[A-Za-z_][\w.]*)\?{1,2}[ \t]*
    )""",
    re.DOTALL | re.VERBOSE,
)
_TOKEN = re.compile(
    r'''
    \#[^\n]*
  | """[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*(?:"""|\Z)
  | \'\'\'[^'\\]*(?:(?:\\.|'(?!\'\'))[^'\\]*)*(?:\'\'\'|\Z)
  | "(?:[^"\\\n]|\\.)*"?
  | '(?:[^'\\\n]|\\.)*'?
  | \\\n
  | (?P<sign>[][(){}\n])
    ''',
    re.DOTALL | re.VERBOSE,
)
_NEEDS_KERNEL = re.compile(r"get_ipython|IPython|\bdisplay\b|matplotlib|pyplot|seaborn|\bplt\b|\.plot\b|\.hist\b")
_DRAWS = re.compile(r"matplotlib|pyplot|seaborn|\bplt\b|\.plot\b|\.hist\b")


@dataclass(frozen=True)
class Cell:
    code: str
    needs_kernel: bool
    """It uses names that are IPython's (`kernel.install`)."""
    draws: bool
    timed: bool = False
    """It began with ``%%time``: tell how long it took."""


def read_cell(source: str) -> Cell:
    magic = _CELL_MAGIC.fullmatch(source) if source.lstrip().startswith("%%") else None
    draws = _DRAWS.search(source) is not None
    if magic is None:
        code = plain_python(source)
        return Cell(code, code != source or _NEEDS_KERNEL.search(source) is not None, draws)
    name, rest, body = magic["name"], magic["rest"].strip(), magic["body"] or ""
    if name == "time" and not rest:
        code = plain_python(body)
        line_breaks = "\n" * source[: len(source) - len(body)].count("\n")
        return Cell(line_breaks + code, code != body or _NEEDS_KERNEL.search(body) is not None, draws, timed=True)
    call = f"{_SHELL}.run_cell_magic({name!r}, {rest!r}, {(rest + chr(10) + body if name == 'time' else body)!r})"
    return Cell(call, needs_kernel=True, draws=draws)


def plain_python(source: str) -> str:
    """The same cell with a call in the place of each line that is IPython's."""
    if not _MAYBE.search(source):
        return source
    return "".join(_rewritten(source))


def _rewritten(source: str) -> Iterator[str]:
    at = 0
    while at < len(source):
        end = _end_of_line(source, at)
        call = _call(source[at:end])
        if call is None:
            end = _end_of_statement(source, at)
            yield source[at:end]
        else:
            yield call + "\n" * source.count("\n", at, end)
        if end < len(source):
            yield "\n"
            end += 1
        at = end


def _end_of_line(source: str, at: int) -> int:
    """Where a line ends that a backslash may carry on, line break excluded."""
    while True:
        end = source.find("\n", at)
        if end < 0:
            return len(source)
        if source[end - 1 : end] != "\\":
            return end
        at = end + 1


def _end_of_statement(source: str, at: int) -> int:
    """Where the Python that begins at `at` ends its logical line, line break excluded."""
    depth = 0
    for token in _TOKEN.finditer(source, at):
        sign = token["sign"]
        if sign == "\n" and depth == 0:
            return token.start()
        if sign is not None and sign != "\n":
            depth = max(0, depth + (1 if sign in "([{" else -1))
    return len(source)


def _call(line: str) -> str | None:
    """Python for one line of IPython's; None if it is not one."""
    line = line.replace("\\\n", " ")
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    indent, whole = found["indent"], line.strip()
    if found["target"] is not None:
        value = found["value"].strip()
        call = _getoutput(value) if found["kind"] == "!" else _line_magic(*_split(value))
        return f"{indent}{found['target']} = {call}"
    if found["captured"] is not None:
        return indent + _getoutput(whole[2:])
    if found["command"] is not None:
        return f"{indent}{_SHELL}.system({whole[1:].strip()!r})"
    if found["magic"] is not None:
        return indent + _line_magic(*_split(whole[1:]))
    return f"{indent}{_SHELL}.help({(found['asked'] or found['named'])!r})"


def _split(text: str) -> tuple[str, str]:
    name, _, rest = text.partition(" ")
    return name, rest.strip()


def _getoutput(command: str) -> str:
    return f"{_SHELL}.getoutput({command.strip()!r})"


def _line_magic(name: str, rest: str) -> str:
    return f"{_SHELL}.run_line_magic({name!r}, {rest!r})"
