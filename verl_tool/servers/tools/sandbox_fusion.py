"""Runs programs in many languages at a SandboxFusion server, or at any server of its ``POST /run_code``.

This project's own tool server is one, for Python. Schema: bytedance/SandboxFusion, ``sandbox/server/sandbox_api.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pydantic import Field, ValidationError

from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sandbox_fusion import CommandRunResult, RunCodeResponse
from verl_tool.servers.tools._programs import signal_name
from verl_tool.servers.tools._remote_code import (
    COMPILATION,
    EXECUTION,
    START_SECONDS,
    RemoteCodeOptions,
    RemoteCodeTool,
    RemoteProgram,
    Stage,
    ending_of,
    not_served,
)
from verl_tool.servers.tools.base import InvalidCall

URL_VARIABLE = "SANDBOX_FUSION_URL"
_NOT_SERVED = "is not served here"
"""What this project's own server says of a language but Python; SandboxFusion itself has all of `_ITS_NAMES`."""
_ITS_NAMES = {
    "bash": "bash",
    "cpp": "cpp",
    "csharp": "csharp",
    "go": "go",
    "java": "java",
    "javascript": "nodejs",
    "julia": "julia",
    "kotlin": "kotlin_script",
    "lean": "lean",
    "lua": "lua",
    "perl": "perl",
    "php": "php",
    "python": "python",
    "r": "R",
    "racket": "racket",
    "ruby": "ruby",
    "rust": "rust",
    "scala": "scala",
    "sql": "sql",
    "swift": "swift",
    "typescript": "typescript",
    "verilog": "verilog",
}
"""Our names of languages, and SandboxFusion's."""
_USUAL = ("python", "bash", "cpp", "csharp", "go", "java", "javascript", "kotlin", "php", "ruby", "rust", "typescript")


class SandboxFusionOptions(RemoteCodeOptions):
    """Those of a service, with SandboxFusion's usual address."""

    url: str = Field(default_factory=lambda: os.environ.get(URL_VARIABLE, "http://127.0.0.1:8080"))
    """Address of the server; without it that of the environment variable ``SANDBOX_FUSION_URL``."""
    languages: tuple[str, ...] = Field(default=_USUAL, min_length=1)


class SandboxFusionTool(RemoteCodeTool):
    """One `POST /run_code` a program."""

    name = "sandbox_fusion"
    service_name = "SandboxFusion"
    description = "Runs a program in one of several languages and returns what it prints. Every call starts afresh."
    example_actions = (
        "```python\nprint(1 + 1)\n```",
        "<python>print(1 + 1)</python>",
        "<tool>print(1 + 1)</tool>",
        '<tool_call>\n{"name": "sandbox_fusion", "arguments": {"language": "bash", "code": "echo 2"}}\n</tool_call>',
    )
    Options = SandboxFusionOptions
    options: SandboxFusionOptions

    @staticmethod
    def service_url(url: str) -> str:
        return url.removesuffix("/run_code")

    async def probe(self) -> None:
        language = self.options.languages[0]
        body = {**self._limits(), "code": "", "language": _ITS_NAMES.get(language, language)}
        await self._ask(body, min(self.seconds(), START_SECONDS))

    async def run_program(self, program: RemoteProgram) -> Sequence[Stage]:
        if program.language not in self.options.languages:
            raise not_served(program.language, self.options.languages)
        language = _ITS_NAMES.get(program.language, program.language)
        body = {**self._limits(), "code": program.code, "language": language, "stdin": program.stdin}
        answer = await self._ask(body, self.seconds())
        found = [
            self._stage(result, what)
            for result, what in ((answer.compile_result, COMPILATION), (answer.run_result, EXECUTION))
            if result is not None
        ]
        if not found:
            raise self.service.malformed(answer)
        return found

    def _limits(self) -> dict[str, Any]:
        options = self.options
        return {
            "run_timeout": options.timeout_seconds,
            "compile_timeout": options.compile_seconds,
            "memory_limit_MB": options.max_memory_mb or -1,
        }

    async def _ask(self, body: dict[str, Any], seconds: float) -> RunCodeResponse:
        answer = await self.service.ask("POST", "/run_code", body, seconds)
        try:
            response = RunCodeResponse.model_validate(answer)
        except ValidationError as error:
            raise self.service.malformed(answer) from error
        if response.status == "SandboxError":
            if _NOT_SERVED in response.message:
                raise InvalidCall(response.message[:200])
            words = f"{self.service_name} at {self.service.url} did not run the program: {response.message[:500]}"
            raise ToolFault(FaultKind.SANDBOX, words, retryable=True)
        return response

    def _stage(self, result: CommandRunResult, what: str) -> Stage:
        stderr = result.stderr or ""
        timed_out = result.status == "TimeLimitExceeded"
        code = result.return_code or 0
        ending = ending_of(
            what,
            timed_out=timed_out,
            seconds=self.options.compile_seconds if what == COMPILATION else self.options.timeout_seconds,
            signal=signal_name(-code) if code < 0 else None,
            code=code,
            told=bool(stderr.strip()),
        )
        output = _joined(result.stdout or "", stderr)
        return Stage(output, ending, not timed_out and code == 0, timed_out, result.execution_time or 0.0)


def _joined(stdout: str, stderr: str) -> str:
    """Both, the errors last: SandboxFusion does not tell their order."""
    between = "\n" if stdout and stderr and not stdout.endswith("\n") else ""
    return f"{stdout}{between}{stderr}"
