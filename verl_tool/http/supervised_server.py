"""Run a tool server as a child process of the training: start it, watch it, restart it if it dies, and stop it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Self

from verl_tool.errors import VerlToolError
from verl_tool.util.atomic_files import atomic_write
from verl_tool.util.parent_death import signalled_with_parent

logger = logging.getLogger(__name__)

STOP_SECONDS = 30.0
"""Time for a server to stop before it is killed."""


class ToolServerError(VerlToolError):
    """The tool server of this run does not start, or dies repeatedly."""


def serve_command(tools: str, port: int, args: Sequence[str] = (), *, app_name: str | None = None) -> list[str]:
    """Return the command line of the project's server on 127.0.0.1. `app_name` is its name if it joins a cluster."""
    named = () if app_name is None or "--embedded" in args else ("--app_name", app_name)
    return [
        *(sys.executable, "-m", "verl_tool.servers.ray_serve", "--host", "127.0.0.1"),
        *("--port", str(port), "--tool_type", tools, *named, *args),
    ]


def write_url_file(path: Path, url: str) -> None:
    """Write the server's URL to `path` atomically, for processes that wait for it."""
    with atomic_write(path) as draft:
        draft.write_text(url, encoding="utf-8")


class SupervisedServer:
    """Keeps a server running for as long as the ``with`` block runs."""

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        log: Path,
        *,
        start_timeout: float = 180.0,
        max_restarts: int = 10,
        url_file: Path | None = None,
    ) -> None:
        """`command` serves `url`, and is up when ``/health`` answers. Its output is written to the file `log`.

        The server writes its actual URL to `url_file`. It may differ from `url` on a Ray cluster that already serves
        something.
        """
        self.url = url
        self._command, self._log = list(command), log
        self._url_file = url_file
        self._start_timeout, self._max_restarts = start_timeout, max_restarts
        self._process: subprocess.Popen[bytes] | None = None
        self._up = threading.Event()
        self._stopping = threading.Event()
        self._failure: ToolServerError | None = None
        # One thread starts all processes, because the parent-death signal is sent when the parent's thread ends.
        self._keeper = threading.Thread(target=self._keep, name="tool-server", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id of the current server process."""
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> Self:
        """Start the server and wait until it answers. Raises ToolServerError with the end of its output."""
        self.start()
        try:
            self.wait_until_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return at once; `stop` must follow."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._keeper.start()

    def wait_until_up(self) -> None:
        """Return when the server answers. Raises ToolServerError with the end of its output."""
        self._up.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop the server and wait until it has exited."""
        self._stopping.set()
        self._keeper.join()

    def _keep(self) -> None:
        try:
            self._start()
            self._up.set()
            for _ in range(self._max_restarts):
                if not self._died():
                    return
                logger.warning("the tool server died (%s); starting it again", self._ending())
                self._start()
            if self._died():
                logger.error("the tool server died %d times; it stays down. See %s", self._max_restarts + 1, self._log)
        except ToolServerError as failure:
            self._failure = failure
            logger.error("%s", failure)
        finally:
            self._end()
            self._up.set()

    def _died(self) -> bool:
        """Wait until the server dies (True) or `stop` is called (False)."""
        assert self._process is not None
        while not self._stopping.wait(0.2):
            if self._process.poll() is not None:
                return True
        return False

    def _start(self) -> None:
        if self._url_file is not None:
            self._url_file.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # In its own group, the server does not get Ctrl-C from the terminal; `_end` stops it in order.
                start_new_session=True,
                preexec_fn=signalled_with_parent(signal.SIGTERM),  # the trainer may be killed
            )
        deadline = time.monotonic() + self._start_timeout
        while not self._answers():
            if self._process.poll() is not None:
                raise ToolServerError(f"the tool server ended at its start ({self._ending()}); {self._last_words()}")
            if self._stopping.wait(0.3):
                return
            if time.monotonic() > deadline:
                raise ToolServerError(
                    f"the tool server did not answer {self.url}/health within tool_server.start_timeout="
                    f"{self._start_timeout} s; {self._last_words()}"
                )

    def _answers(self) -> bool:
        if self._url_file is not None:
            if not self._url_file.exists():
                return False
            self.url = self._url_file.read_text(encoding="utf-8")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("the tool server did not stop within %s s; killing it", STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _ending(self) -> str:
        assert self._process is not None
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def _last_words(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return f"the end of {self._log}:\n{text[-2000:]}"
