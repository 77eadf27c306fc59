"""``python -m verl_tool.servers.ray_serve`` in its own process, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from listeners import Listeners

from verl_tool.servers.serve.ports import free_ports

READY_SECONDS = 240.0
STOP_SECONDS = 45.0
COMMAND = [sys.executable, "-m", "verl_tool.servers.ray_serve"]


class Server:
    """The command in its own process."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "server.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "--port", str(self.port), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environment},
                start_new_session=True,
            )

    def output(self) -> str:
        """Return its output."""
        return self._log.read_text(errors="replace")

    def wait_until_ready(self) -> str:
        """Return its output once it serves."""
        deadline = time.monotonic() + READY_SECONDS
        while "\ntry " not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)
        return self.output()

    def family(self) -> list[psutil.Process]:
        """Return all its descendants."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        """Kill what is left after a failed test."""
        if self.process.poll() is None:
            for process in [*self.family(), psutil.Process(self.process.pid)]:
                process.kill()
            self.process.wait(timeout=STOP_SECONDS)


def start(folder: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    server = Server(folder, *arguments, **environment)
    try:
        with Listeners(server.process.pid) as listeners:
            yield server
    finally:
        server.end()
    assert listeners.on_loopback
    assert listeners.open_to_others == []


def run(*arguments: str, by: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. `by` starts it."""
    return subprocess.run(
        [*by, *COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    )


def gone(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return the processes that still live after `seconds`, or none once all have exited."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return alive
