"""A child process that answers JSON lines on stdin with JSON lines on stdout."""

from __future__ import annotations

import contextlib
import json
from asyncio.subprocess import Process
from collections.abc import Mapping
from typing import Any


async def ask_process(process: Process, question: Mapping[str, Any]) -> dict[str, Any]:
    """The first answer to a question. Raises as `read_answer`, and OSError if it reads nothing."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    await process.stdin.drain()
    return await read_answer(process)


async def read_answer(process: Process) -> dict[str, Any]:
    """The next answer. Raises ValueError if the process ended, or writes another thing."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise ValueError(f"it ended with exit code {await process.wait()}")
    return dict(json.loads(line))


async def kill_process(process: Process) -> None:
    """Kill it, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
