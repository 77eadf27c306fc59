"""Runs the model's Python in the sandbox: each action a program of its own, nothing kept from turn to turn.

Blocks that follow one another in an action are one program: they run in order, in one process, and a name defined in
the first is known in the second. The observation is what the program wrote to stdout and stderr, as a terminal shows
it, and how it ended if it did not end by itself.
"""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import ClassVar

from pydantic import AliasChoices, Field

from verl_tool.errors import SandboxError, ToolFault
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind
from verl_tool.sandbox import Level, Limits, Policy, RunResult, SandboxPool
from verl_tool.servers.tools.base import Context, Tool, ToolOptions, ToolResult

NO_OUTPUT = "(no output; print what you want to see)"
_NO_CODE = 'Give the program as the argument "code", a string: {"code": "print(1 + 1)"}.'
_CODE_KEYS = ("code", "input", "script", "python")
_FENCED_PAYLOAD = re.compile(r"\s*```[\w+-]*[ \t]*\n(?P<code>.*?)\n?[ \t]*```\s*", re.DOTALL)


class PythonCodeOptions(ToolOptions):
    """Limits of one program, rules for it, and the size of the pool."""

    timeout_seconds: float = Field(default=10.0, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    """Wall time of one program."""
    max_output_length: int = Field(default=4000, ge=100)
    """Characters of an observation; of a longer one the middle is left out."""
    max_memory_mb: int = Field(default=2048, ge=64)
    """Memory of one program, megabytes of 2**20 bytes."""
    pre_import: tuple[str, ...] = ()
    """Modules or import statements, such as ``import numpy as np``, that every program finds done."""
    allowed_modules: tuple[str, ...] | None = None
    """Top-level modules that programs may import; None: every installed one."""
    restricted_functions: tuple[str, ...] = ()
    """Functions that programs may not call, such as ``eval`` or ``os.system``."""
    isolation: str = Level.full.name
    """The lowest level of isolation with which the tool agrees to start."""
    workers: int | None = Field(default=None, ge=1)
    """Warm processes that programs are forked from; None: one a core."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Programs that run at once; None: 16 a core, four of them younger than a second."""


class PythonCodeTool(Tool):
    """One sandbox pool; one run an action."""

    name = "python_code"
    aliases = ("python", "py", "python3", "PYTHON", "tool", "python_executor", "code_interpreter")
    description = (
        "Runs a Python program and returns what it prints. Every call starts afresh: define what you need in it."
    )
    parameters: ClassVar = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "the program; print what you want to see"},
            "stdin": {"type": "string", "description": "what the program reads from standard input"},
        },
        "required": ["code"],
    }
    example_actions = (
        "```python\nprint(1 + 1)\n```",
        "<python>print(1 + 1)</python>",
        "<PYTHON>print(1 + 1)</PYTHON>",
        "<tool>print(1 + 1)</tool>",
        '<tool_call>\n{"name": "python_code", "arguments": {"code": "print(1 + 1)"}}\n</tool_call>',
        "<request><python>print(1 + 1)<call>",
    )
    Options = PythonCodeOptions
    options: PythonCodeOptions

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        chosen = self.options
        self._limits = Limits(wall_seconds=chosen.timeout_seconds, memory_bytes=chosen.max_memory_mb << 20)
        self._policy = Policy(chosen.allowed_modules, chosen.restricted_functions, chosen.pre_import)
        self._level = Level.parse(chosen.isolation)

    async def start(self) -> None:
        pool = SandboxPool(
            workers=self.options.workers,
            limits=self._limits,
            policy=self._policy,
            required_level=self._level,
            max_concurrent=self.options.max_concurrent,
        )
        await pool.start()
        self.sandbox = pool

    async def close(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.close()

    async def check(self) -> None:
        await self._pool().check()

    def join(self, calls: Sequence[Call]) -> list[Call]:
        joined: list[Call] = []
        for (_, is_text), group in groupby(calls, key=lambda call: (id(call.format), _is_text(call))):
            members = list(group)
            joined += [_one_program(members)] if is_text else members
        return joined

    async def run(self, call: Call, context: Context) -> ToolResult:
        code = _code(call)
        if code is None:
            return ToolResult(_NO_CODE, valid=False, error=True, invalid_reason="no code in the arguments")
        result = await self._pool().run(code, stdin=_stdin(call, context), limits=self._limits)
        metrics = {
            "wall_seconds": result.wall_seconds,
            "timed_out": float(result.timed_out),
            "error": float(not result.ok),
        }
        return ToolResult(self._observation(result), error=not result.ok, metrics=metrics)

    def _pool(self) -> SandboxPool:
        if self.sandbox is None:
            raise SandboxError("python_code has not been started", retryable=True)
        return self.sandbox

    def _observation(self, result: RunResult) -> str:
        """What the program wrote, and how it ended if it did not end by itself."""
        written = result.output.rstrip("\n")
        dropped = (result.stdout_bytes + result.stderr_bytes) - len(result.stdout_raw) - len(result.stderr_raw)
        if dropped > 0:
            written += f"\n[{dropped} more bytes were written and not kept]"
        ending = _ending(result, self._limits)
        if not written and not ending:
            return NO_OUTPUT
        return "\n".join(part for part in (cut_middle(written, self.options.max_output_length), ending) if part)


def cut_middle(text: str, limit: int) -> str:
    """`text`, or its beginning and its end around a mark, `limit` characters in all besides the mark."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[-tail:]}"


def _is_text(call: Call) -> bool:
    return call.arguments is None and call.error is None


def _one_program(calls: list[Call]) -> Call:
    first, last = calls[0], calls[-1]
    if first is last:
        return first
    code = "\n".join(_source(call.input) for call in calls)
    return replace(first, input=code, end=last.end, missing=last.missing)


def _code(call: Call) -> str | None:
    """The program, or None if the call's arguments hold none."""
    if call.arguments is None:
        return _source(call.input)
    named = (call.arguments.get(key) for key in _CODE_KEYS)
    code = next((value for value in named if isinstance(value, str)), None)
    return None if code is None else _source(code)


def _source(payload: str) -> str:
    """The program in a payload: out of its own fence if it has one, and not indented as a whole."""
    fenced = _FENCED_PAYLOAD.fullmatch(payload)
    code = (fenced["code"] if fenced else payload).strip("\r\n")
    if not code.startswith((" ", "\t")):
        return code
    dedented = textwrap.dedent(code)
    return dedented.lstrip(" \t") if dedented.startswith((" ", "\t")) else dedented


def _stdin(call: Call, context: Context) -> str:
    """What the model gave as ``stdin``, else what the request's extra field of that name holds."""
    given = (call.arguments or {}).get("stdin")
    stdin = given if given is not None else context.extra.get("stdin", "")
    if stdin is None or isinstance(stdin, str):
        return stdin or ""
    if given is not None:
        return str(given)
    message = f"the extra field 'stdin' is a {type(stdin).__name__}; send a string"
    raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)


def _ending(result: RunResult, limits: Limits) -> str:
    """How a program ended that did not end well, as far as its own output does not say it."""
    if result.limit_hit == "cpu_seconds":
        return f"Execution timed out: it used more than {limits.cpu_seconds:g} seconds of CPU time."
    if result.timed_out:
        return f"Execution timed out: it ran longer than {limits.wall_seconds:g} seconds."
    if result.limit_hit == "memory_bytes" or result.stderr.rstrip().endswith("MemoryError"):
        return f"Memory limit exceeded: a program may use {limits.memory_bytes >> 20} MB."
    if result.limit_hit == "sandbox":
        return "Execution was ended: the program broke the process that ran it."
    if result.signal is not None:
        return f"Execution was ended by signal {result.signal} ({_signal_name(result.signal)})."
    if result.exit_code and not result.stderr:
        return f"Exit code: {result.exit_code}"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
