"""Answers ``POST /run_code`` (SandboxFusion's schema) from a sandbox pool. Only Python is served."""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace
from typing import TYPE_CHECKING

from verl_tool.errors import ConfigError, SandboxError
from verl_tool.sandbox_fusion import CommandRunResult, RunCodeRequest, RunCodeResponse

if TYPE_CHECKING:
    from verl_tool.sandbox import Limits, RunResult, SandboxPool


async def run_code(pool: SandboxPool, request: RunCodeRequest, max_seconds: float) -> RunCodeResponse:
    """Run `request` in `pool`. Whatever goes wrong is told in the schema's own way; nothing is raised for it."""
    if request.language != "python":
        return _refused(f"language {request.language[:40]!r} is not served here; send 'python'")
    try:
        files = {path: base64.b64decode(text or "", validate=True) for path, text in request.files.items()}
    except binascii.Error as error:
        return _refused(f"'files': {error}; send each file's content as base64")
    try:
        limits = _limits(pool.limits, request, max_seconds)
        result = await pool.run(
            request.code,
            stdin=request.stdin or "",
            files=files,
            fetch_files=request.fetch_files,
            limits=limits,
        )
    except (SandboxError, ConfigError) as error:
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
