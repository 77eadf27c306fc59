"""SandboxFusion's ``POST /run_code``, so that rewards written for it can use the tool server.

Schema: bytedance/SandboxFusion, ``sandbox/server/sandbox_api.py``. This module imports nothing else of the project.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import BaseModel, Field, field_validator, model_validator

MAX_FILES = 256
"""Most files given, and most files fetched, of one program."""
MAX_PATH_CHARACTERS = 1024
MAX_PATH_DEPTH = 32
MAX_PART_BYTES = 255
MAX_LANGUAGE_CHARACTERS = 64


Names = TypeVar("Names", dict[str, str | None], list[str])


class RunCodeRequest(BaseModel):
    """One program to run. Unknown fields are passed over, as SandboxFusion does."""

    code: str
    language: str = Field("python", max_length=MAX_LANGUAGE_CHARACTERS)
    stdin: str | None = None
    compile_timeout: float = Field(10.0, gt=0)
    """Seconds. Python has no compile step: it limits nothing."""
    run_timeout: float = Field(10.0, gt=0)
    """Seconds, at most the server's own limit for one request."""
    memory_limit_MB: int = -1
    """Megabytes of 2**20 bytes, at most the sandbox's own limit; not above 0: the sandbox's own limit."""
    files: dict[str, str | None] = Field(default={}, max_length=MAX_FILES)
    """Base64 of each file's content by path below the working folder."""
    fetch_files: list[str] = Field(default=[], max_length=MAX_FILES)
    """Files to give back, if the program has left them."""

    @field_validator("files", "fetch_files")
    @classmethod
    def _within_the_folder(cls, names: Names) -> Names:
        for name in names:
            _reject_bad_path(name)
        return names

    @model_validator(mode="after")
    def _no_file_is_a_folder_too(self) -> RunCodeRequest:
        parted = [name.split("/") for name in self.files]
        folders = {"/".join(parts[:n]) for parts in parted for n in range(1, len(parts))}
        for name in self.files:
            if name in folders:
                raise ValueError(f"'files': {name[:80]!r} is a file and the folder of another; name one of them anew")
        return self


def _reject_bad_path(name: str) -> None:
    parts = name.split("/")
    longest = max(len(part.encode(errors="replace")) for part in parts)
    if len(name) > MAX_PATH_CHARACTERS or len(parts) > MAX_PATH_DEPTH or longest > MAX_PART_BYTES:
        raise ValueError(
            f"the path {name[:80]!r} is too long; send at most {MAX_PATH_CHARACTERS} characters in at most "
            f"{MAX_PATH_DEPTH} parts of {MAX_PART_BYTES} bytes"
        )
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"the path {name[:80]!r} is none within the run's folder; send one such as 'data/in.csv'")


class CommandRunResult(BaseModel):
    """How one command ended."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
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
