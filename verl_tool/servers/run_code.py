"""``POST /run_code`` in SandboxFusion's schema, so that rewards written for it can use this server.

Schema: bytedance/SandboxFusion, ``sandbox/server/sandbox_api.py``. Only Python is served, without a compile step.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from verl_tool.errors import SandboxError

if TYPE_CHECKING:
    from verl_tool.sandbox import Limits, RunResult, SandboxPool


class RunCodeRequest(BaseModel):
    """One program to run. Unknown fields are passed over, as SandboxFusion does."""

    code: str
    language: str = "python"
    stdin: str | None = None
    compile_timeout: float = Field(10.0, gt=0)
    """Seconds. Python has no compile step: it limits nothing."""
    run_timeout: float = Field(10.0, gt=0)
    """Seconds, at most the server's own limit for one request."""
    memory_limit_MB: int = -1
    """Megabytes of 2**20 bytes, at most the sandbox's own limit; not above 0: the sandbox's own limit."""
    files: dict[str, str | None] = {}
    """Base64 of each file's content by path below the working folder."""
    fetch_files: list[str] = []
    """Files to give back, if the program has left them."""


class CommandRunResult(BaseModel):
    """How one command ended."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    """Wall time, seconds."""
    return_code: int | None = None
    """Exit code; minus the signal's number if a signal ended it."""
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    """``Success``: exit code 0. ``Failed``: another one, or out of time. ``SandboxError``: it did not run properly."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}
    """Base64 of each fetched file's content."""


async def run_code(pool: SandboxPool, request: RunCodeRequest, max_seconds: float) -> RunCodeResponse:
    """Run `request` in `pool`. Whatever goes wrong is told in the schema's own way; nothing is raised for it."""
    if request.language != "python":
        return _refused(f"language {request.language[:40]!r} is not served here; send 'python'")
    try:
        files = {path: base64.b64decode(text or "", validate=True) for path, text in request.files.items()}
    except binascii.Error as error:
        return _refused(f"'files': {error}; send each file's content as base64")
    limits = _limits(pool.limits, request, max_seconds)
    try:
        result = await pool.run(
            request.code,
            stdin=request.stdin or "",
            files=files,
            fetch_files=request.fetch_files,
            limits=limits,
        )
    except (SandboxError, ValueError) as error:
        return _refused(str(error))
    return _told(result)


def _limits(own: Limits, request: RunCodeRequest, max_seconds: float) -> Limits:
    asked = request.memory_limit_MB << 20
    memory = min(asked, own.memory_bytes) if asked > 0 else own.memory_bytes
    return replace(own, wall_seconds=min(request.run_timeout, max_seconds), memory_bytes=memory)


def _refused(message: str) -> RunCodeResponse:
    return RunCodeResponse(status="SandboxError", message=message)


def _told(result: RunResult) -> RunCodeResponse:
    code = -result.signal if result.signal is not None else result.exit_code
    run = CommandRunResult(
        status="TimeLimitExceeded" if result.timed_out else "Finished",
        execution_time=result.wall_seconds,
        return_code=None if result.timed_out else code,
        stdout=result.stdout,
        stderr=result.stderr,
    )
    return RunCodeResponse(
        status="Success" if code == 0 and not result.timed_out else "Failed",
        run_result=run,
        files={path: base64.b64encode(content).decode() for path, content in result.files.items()},
    )
