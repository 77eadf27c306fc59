"""Programs of other systems, each run by the interpreter of its own virtual environment."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

START_SECONDS = 150.0
"""Importing some of them takes half a minute on a loaded machine."""


def peer_python(name: str) -> str:
    """The Python of a package of another system, which ``scripts/install_peers.sh`` installs. Skips without it."""
    folder = os.environ.get("VERL_TOOL_PEERS")
    if not folder:
        pytest.skip("VERL_TOOL_PEERS is not set: bash scripts/install_peers.sh FOLDER installs what it names")
    python = Path(folder) / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} does not exist: bash scripts/install_peers.sh {folder}")
    return str(python)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class PeerProgram:
    """A server at 127.0.0.1, whose source is given to its interpreter: that may see no file of this project."""

    def __init__(self, interpreter: str | Path, source: Path, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [str(interpreter), "-c", source.read_text(), *arguments, str(self.port)]
        self._process: asyncio.subprocess.Process | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this

    async def start(self) -> None:
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        while not await self._answers():
            if process.returncode is not None or time.monotonic() > deadline:
                await self.kill()
                self._errors.seek(0)
                printed = self._errors.read()[-2000:].decode("utf-8", "replace")
                raise RuntimeError(f"{self._command[0]} {self._command[3:]} does not serve: {printed}")
            await asyncio.sleep(0.1)

    async def kill(self) -> None:
        """End it as a crash does: without a word to its clients."""
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def _answers(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True


@asynccontextmanager
async def running_program(interpreter: str | Path, source: Path, *arguments: str) -> AsyncIterator[PeerProgram]:
    program = PeerProgram(interpreter, source, *arguments)
    await program.start()
    try:
        yield program
    finally:
        await program.kill()
