"""Programs in calls, and what is told of how they ended: for the tools that run Python."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from verl_tool.content.parts import MediaPart
from verl_tool.errors import ToolFault
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind
from verl_tool.sandbox import Limits, RunResult, SessionLimits
from verl_tool.servers.tools.base import Context, InvalidCall, ToolResult

NO_OUTPUT = "(no output; print what you want to see)"
NO_CODE = 'give the program as the argument "code", a string: {"code": "print(1 + 1)"}'
_CODE_KEYS = ("code", "input", "script", "python")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,16}\b")
_FENCED_PAYLOAD = re.compile(r"\s*```[\w+-]*[ \t]*\n(?P<code>.*?)\n?[ \t]*```\s*", re.DOTALL)


def without_addresses(text: str) -> str:
    """`text` with every address of an object (``<object at 0x7f3a5c0b1d90>``) as ``0x…``."""
    return _ADDRESS.sub("0x…", text)


def cut_middle(text: str, limit: int) -> str:
    """`text`, or its beginning and its end around a mark, `limit` characters in all besides the mark."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[-tail:]}"


def cut_parts(parts: Iterable[str | MediaPart], limit: int) -> list[str | MediaPart]:
    """Texts with images and audios between them; if the texts have more than `limit` characters together, all text as
    `cut_middle` leaves it, and the others behind it."""
    filled = [part for part in parts if part]
    text = "".join(part for part in filled if isinstance(part, str))
    if len(text) <= limit:
        return filled
    return [cut_middle(text, limit), *(part for part in filled if not isinstance(part, str))]


def combine_parts(parts: Sequence[str | MediaPart], *, error: bool, metrics: Mapping[str, float]) -> ToolResult:
    """A result of these parts; of texts alone, of their text."""
    if all(isinstance(part, str) for part in parts):
        return ToolResult("".join(map(str, parts)), error=error, metrics=metrics)
    return ToolResult(parts=parts, error=error, metrics=metrics)


def joined(calls: Sequence[Call]) -> list[Call]:
    """Texts that follow one another as one program; each call with arguments by itself."""
    found: list[Call] = []
    for (_, is_text), group in groupby(calls, key=lambda call: (id(call.format), _is_text(call))):
        members = list(group)
        found += [_one_program(members)] if is_text else members
    return found


def written_by(result: RunResult) -> str:
    """What a program wrote, and how many bytes of it were not kept."""
    written = result.output.rstrip("\n")
    dropped = (result.stdout_bytes + result.stderr_bytes) - len(result.stdout_raw) - len(result.stderr_raw)
    return f"{written}\n[{dropped} more bytes were written and not kept]" if dropped > 0 else written


def metrics_of(result: RunResult) -> dict[str, float]:
    """Of a program's run, for the call's record."""
    return {
        "wall_seconds": result.wall_seconds,
        "timed_out": float(result.timed_out),
        "error": float(not result.ok),
    }


def _is_text(call: Call) -> bool:
    return call.arguments is None and call.error is None


def _one_program(calls: list[Call]) -> Call:
    first, last = calls[0], calls[-1]
    if first is last:
        return first
    code = "\n".join(_source(call.input) for call in calls)
    return replace(first, input=code, end=last.end, missing=last.missing)


def code_of(call: Call) -> str:
    """The program. Raises InvalidCall if the call's arguments hold none."""
    if call.arguments is None:
        return _source(call.input)
    named = (call.arguments.get(key) for key in _CODE_KEYS)
    code = next((value for value in named if isinstance(value, str)), None)
    if code is None:
        raise InvalidCall(NO_CODE)
    return _source(code)


def _source(payload: str) -> str:
    """The program in a payload: out of its own fence if it has one, and not indented as a whole."""
    fenced = _FENCED_PAYLOAD.fullmatch(payload)
    code = (fenced["code"] if fenced else payload).strip("\r\n")
    if not code.startswith((" ", "\t")):
        return code
    dedented = textwrap.dedent(code)
    return dedented.lstrip(" \t") if dedented.startswith((" ", "\t")) else dedented


def stdin_of(call: Call, context: Context) -> str:
    """What the model gave as ``stdin``, else what the request's extra field of that name holds."""
    written = (call.arguments or {}).get("stdin")
    stdin = written if written is not None else context.extra.get("stdin", "")
    if stdin is None or isinstance(stdin, str):
        return stdin or ""
    if written is not None:
        return str(written)
    message = f"the extra field 'stdin' is a {type(stdin).__name__}; send a string"
    raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)


def ending_of(result: RunResult, limits: Limits, of: str = "a program") -> str:
    """How a program ended that did not end well, as far as its own output does not say it."""
    if result.limit_hit == "total_wall_seconds" and isinstance(limits, SessionLimits):
        return f"Nothing was run: all calls together may take {limits.total_wall_seconds:g} seconds, and they did."
    if result.limit_hit == "cpu_seconds":
        return f"Execution timed out: it used more than {limits.cpu_seconds:g} seconds of CPU time."
    if result.timed_out:
        return f"Execution timed out: it ran longer than {limits.wall_seconds:g} seconds."
    if result.limit_hit == "memory_bytes" or result.stderr.rstrip().endswith("MemoryError"):
        return f"Memory limit exceeded: {of} may use {limits.memory_bytes >> 20} MB."
    if result.limit_hit == "sandbox":
        return "Execution was ended: the program broke the process that ran it."
    if result.signal is not None:
        return f"Execution was ended by signal {signal_name(result.signal)}."
    if result.exit_code and not result.stderr:
        return f"Exit code: {result.exit_code}"
    return ""


def signal_name(number: int) -> str:
    """Such as ``9 (SIGKILL)``."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return f"{number} (a real-time signal)"
