"""Runs a problem's public tests against the model's program, and shows which fail and how.

The tests are the request's extra field ``public_tests``, in training ``extra_info.tools_kwargs.public_tests`` of the
row. They are judged as the reward managers judge hidden ones (`verl_tool/judge`): the program can neither read them nor
write a verdict. Hidden tests never reach this server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import AliasChoices, Field

from verl_tool.errors import SandboxError, ToolFault
from verl_tool.formats import Call
from verl_tool.judge.code_tests import JudgeRun, JudgeVerdict, NoVerdict, TestSuite, Verdicts, judge_modules, suite_in
from verl_tool.protocol import FaultKind
from verl_tool.sandbox import Level, Limits, RunResult, SandboxPool
from verl_tool.servers.tools._programs import code_of, cut_middle
from verl_tool.servers.tools._sandboxed import PoolOptions, ProgramTool
from verl_tool.servers.tools._without_policy import WithoutPolicy
from verl_tool.servers.tools.base import Context, ToolResult

FIELD = "public_tests"
_PART = 600
"""Most characters of an input, an expected output or a test in an observation."""
_MAX_DISPLAYED = 40_000
"""Most characters of values that the judge tells of one program."""
_PROBLEMS = {
    "assertion": "wrong answer",
    "output": "wrong answer",
    "error": "runtime error",
    "time": "time limit exceeded",
    "ended": "the program's process ended",
    "load": "the program cannot be loaded",
    "refused": "the test was refused",
    "budget": "not run, for the time for all tests was over",
    "no verdict": "not run to its end",
}


class PythonOJOptions(PoolOptions, WithoutPolicy):
    """Limits of the tests of one program, and the size of the pool."""

    test_seconds: float = Field(default=4.0, gt=0)
    """Wall time of one test, loading the program included."""
    timeout_seconds: float = Field(default=20.0, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    """Wall time of all tests of one program."""
    max_tests: int = Field(default=64, ge=1)
    """Tests beyond it are not run."""
    max_failures: int = Field(default=3, ge=1)
    """Failed tests that an observation shows."""
    done_if_passed: bool = True
    """Whether a program that passes all public tests ends the trajectory."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Programs that are tested at once; None: 16 a core, four of them younger than a second."""


class PythonOJTool(ProgramTool):
    """One sandbox pool; one run of the judge a program."""

    name = "python_oj"
    aliases = ("python", "py", "python3", "PYTHON", "tool", "python_executor", "code_interpreter")
    description = "Runs a Python program on the problem's public tests and tells which of them fail and how."
    parameters: ClassVar = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the whole program, or the functions asked for"}},
        "required": ["code"],
    }
    example_actions = (
        "```python\ndef add(a, b):\n    return a + b\n```",
        "<python>def add(a, b):\n    return a + b</python>",
        '<tool_call>\n{"name": "python_oj", "arguments": {"code": "def add(a, b):\\n    return a + b"}}\n</tool_call>',
    )
    Options = PythonOJOptions
    options: PythonOJOptions

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._level = Level.parse(self.options.isolation)

    def _new_pool(self) -> SandboxPool:
        return SandboxPool(
            workers=self.options.workers,
            limits=Limits(memory_bytes=self.options.max_memory_mb << 20),
            required_level=self._level,
            max_concurrent=self.options.max_concurrent,
        )

    async def run(self, call: Call, context: Context) -> ToolResult:
        code = code_of(call)
        suite, run = await asyncio.to_thread(self._job, code, context.extra)
        limits = Limits(wall_seconds=run.run_timeout, memory_bytes=self.options.max_memory_mb << 20)
        result = await self._pool().run(run.code, stdin=run.stdin, files=judge_modules(), limits=limits)
        try:
            verdicts = run.read(result.stdout, result.stderr, _ended(result, self.options))
        except NoVerdict as error:
            raise SandboxError(str(error)) from error
        return self._describe_value(suite, verdicts)

    def _job(self, code: str, extra: Mapping[str, Any]) -> tuple[TestSuite, JudgeRun]:
        """The tests and the run. Raises ToolFault if the request brings no tests."""
        options = self.options
        try:
            suite = suite_in(extra.get(FIELD), options.max_tests)
        except ValueError as error:
            problem = "brings no" if extra.get(FIELD) is None else "has an unreadable"
            message = (
                f"tool python_oj: the request {problem} extra field {FIELD!r}: {error}. In training it is the row's "
                "extra_info.tools_kwargs.public_tests"
            )
            raise ToolFault(FaultKind.MISCONFIGURED, message, retryable=False) from error
        return suite, JudgeRun.of(code, suite, options.test_seconds, options.timeout_seconds, _MAX_DISPLAYED)

    def _describe_value(self, suite: TestSuite, verdicts: Verdicts) -> ToolResult:
        failed = [(number, verdict) for number, verdict in enumerate(verdicts.of) if not verdict.passed]
        metrics = {"pass_rate": verdicts.pass_rate, "tests": float(len(suite)), "time_outs": float(verdicts.time_outs)}
        if not failed:
            text = f"All public tests passed: {len(suite)} of {len(suite)}."
            return ToolResult(text, done=self.options.done_if_passed, metrics={**metrics, "error": 0.0})
        lines = [f"{len(failed)} of {len(suite)} public tests failed."]
        if all(verdict.reason == "load" for _, verdict in failed):
            lines.append(f"{_PROBLEMS['load'].capitalize()}: {failed[0][1].detail}")
        else:
            first, rest = failed[: self.options.max_failures], failed[self.options.max_failures :]
            lines += [f"\nTest {number + 1}: {_describe(suite, number, verdict)}" for number, verdict in first]
            if rest:
                lines.append(f"\nFailed too: {', '.join(str(number + 1) for number, _ in rest)}.")
        text = cut_middle("\n".join(lines), self.options.max_output_length)
        return ToolResult(text, error=True, metrics={**metrics, "error": 1.0})


def _describe(suite: TestSuite, number: int, verdict: JudgeVerdict) -> str:
    """One failed test: what was wrong, what it was given, what it expected, and what was seen."""
    problem = _PROBLEMS.get(verdict.reason, verdict.reason)
    seen = dict(verdict.seen)
    detail = "" if verdict.reason == "output" or seen.get("stderr") else verdict.detail
    headline = f"{problem}: {detail}" if detail else problem
    if number < len(suite.tests):
        values = [f"{source} is {value}" for source, value in verdict.seen]
        return "\n".join((headline, _part(suite.tests[number].strip()), *values))
    number -= len(suite.tests)
    if number < len(suite.calls):
        call = suite.calls[number]
        lines = [headline, f"Input: {_part(str(call))}", f"Expected: {_part(call.expected[0])}"]
        return "\n".join((*lines, *(f"Seen: {value}" for value in seen.values())))
    stdin, stdout = suite.programs[number - len(suite.calls)]
    texts = {"Input": stdin, "Expected output": stdout, "Output": seen.get("stdout")}
    texts["Error"] = seen.get("stderr") or None
    parts = (f"{name}:\n{_part(text.rstrip()) or '(nothing)'}" for name, text in texts.items() if text is not None)
    return "\n".join((headline, *parts))


def _part(text: str) -> str:
    return cut_middle(text, _PART)


def _ended(result: RunResult, options: PythonOJOptions) -> str:
    """How a run ended, in words for the model: those of tests that it did not come to."""
    if result.limit_hit == "memory_bytes":
        return f"the tests may use {options.max_memory_mb} MB of memory together"
    if result.timed_out:
        return "it took too long"
    return f"signal {result.signal}" if result.signal is not None else f"exit code {result.exit_code}"
