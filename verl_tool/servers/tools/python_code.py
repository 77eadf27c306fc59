"""Runs the model's Python in the sandbox: each action a program of its own, nothing kept from turn to turn.

Blocks that follow one another in an action are one program: they run in order, in one process, and a name defined in
the first is known in the second. The observation is what the program wrote to stdout and stderr, as a terminal shows
it, and how it ended if it did not end by itself.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from verl_tool.formats import Call
from verl_tool.sandbox import Level, Limits, Policy, RunResult, SandboxPool
from verl_tool.servers.tools._programs import (
    NO_OUTPUT,
    code_of,
    cut_middle,
    ending_of,
    metrics_of,
    stdin_of,
    without_addresses,
    written_by,
)
from verl_tool.servers.tools._sandboxed import PolicyOptions, ProgramTool
from verl_tool.servers.tools.base import Context, ToolResult


class PythonCodeOptions(PolicyOptions):
    """As of every tool with a pool, and how many programs run in it."""

    max_concurrent: int | None = Field(default=None, ge=1)
    """Programs that run at once; None: 16 a core, four of them younger than a second."""


class PythonCodeTool(ProgramTool):
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

    @classmethod
    def comparable(cls, observation: str) -> str:
        return without_addresses(observation)

    def _new_pool(self) -> SandboxPool:
        return SandboxPool(
            workers=self.options.workers,
            limits=self._limits,
            policy=self._policy,
            required_level=self._level,
            max_concurrent=self.options.max_concurrent,
        )

    async def run(self, call: Call, context: Context) -> ToolResult:
        code = code_of(call)
        result = await self._pool().run(code, stdin=stdin_of(call, context), limits=self._limits)
        return ToolResult(self._observation(result), error=not result.ok, metrics=metrics_of(result))

    def _observation(self, result: RunResult) -> str:
        """What the program wrote, and how it ended if it did not end by itself."""
        written, ending = written_by(result), ending_of(result, self._limits)
        if not written and not ending:
            return NO_OUTPUT
        return "\n".join(part for part in (cut_middle(written, self.options.max_output_length), ending) if part)
