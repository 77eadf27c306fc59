"""SandboxFusion's ``POST /run_code``, so that rewards written for it can use the tool server.

Schema: bytedance/SandboxFusion, ``sandbox/server/sandbox_api.py``. This module imports nothing else of the project.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


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
