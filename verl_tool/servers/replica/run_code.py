"""Answer ``POST /run_code`` (SandboxFusion's schema) with a sandbox pool. Only Python is supported."""

from __future__ import annotations

import asyncio
import base64
import binascii
from dataclasses import replace
from typing import TYPE_CHECKING

from verl_tool.errors import ConfigError, SandboxError
from verl_tool.http.messages import HttpError
from verl_tool.sandbox_fusion import CommandRunResult, RunCodeRequest, RunCodeResponse
from verl_tool.servers.replica.wire import INLINE_BYTES

if TYPE_CHECKING:
    from verl_tool.sandbox import Limits, RunResult, SandboxPool

MAX_FETCHED_BYTES = 8 << 20
"""Maximum total size of the files in one answer."""


async def run_code(pool: SandboxPool, request: RunCodeRequest, max_seconds: float) -> RunCodeResponse:
    """Run `request` in `pool`. A failure of the run is reported in the answer, as the schema provides.

    Raises HttpError 400 if no run is possible: a file whose content is not base64, files that do not fit into the
    folder, a limit that is too low for any process.
    """
    if request.language != "python":
        return _rejection(f"language {request.language[:40]!r} is not served here; send 'python'")
    files = {path: await _decoded(path, text or "") for path, text in request.files.items()}
    try:
        limits = _limits(pool.limits, request, max_seconds)
        result = await pool.run(
            request.code,
            stdin=request.stdin or "",
            files=files,
            fetch_files=request.fetch_files,
            limits=limits,
        )
    except ConfigError as error:
        raise HttpError(400, "bad_request", str(error)) from None
    except SandboxError as error:
        return _rejection(str(error))
    return await _describe(result)


async def _decoded(path: str, text: str) -> bytes:
    """Decode a file's content, in a thread if it is large.

    Raises HttpError 400 if it is not base64.
    """
    try:
        if len(text) <= INLINE_BYTES:
            return base64.b64decode(text, validate=True)
        return await asyncio.to_thread(base64.b64decode, text, validate=True)
    except (binascii.Error, ValueError) as error:
        message = f"'files': the content of {path[:80]!r} is not base64: {error}; send each file's content as base64"
        raise HttpError(400, "bad_request", message, "files") from None


def _limits(own: Limits, request: RunCodeRequest, max_seconds: float) -> Limits:
    requested = request.memory_limit_MB << 20
    memory = min(requested, own.memory_bytes) if requested > 0 else own.memory_bytes
    return replace(own, wall_seconds=min(request.run_timeout, max_seconds), memory_bytes=memory)


def _rejection(message: str) -> RunCodeResponse:
    return RunCodeResponse(status="SandboxError", message=message)


async def _encoded(content: bytes) -> str:
    if len(content) <= INLINE_BYTES:
        return base64.b64encode(content).decode()
    return (await asyncio.to_thread(base64.b64encode, content)).decode()


async def _describe(result: RunResult) -> RunCodeResponse:
    size = sum(map(len, result.files.values()))
    if size > MAX_FETCHED_BYTES:
        return _rejection(f"the files to fetch are {size} bytes; at most {MAX_FETCHED_BYTES} are sent. Fetch fewer")
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
        files={path: await _encoded(content) for path, content in result.files.items()},
    )
