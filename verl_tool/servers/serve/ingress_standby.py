"""A HAProxy that stands in while Serve starts one in place of one that died.

Serve takes many seconds for that: it checks, and then starts a Python process that starts HAProxy. The stand-in takes
requests after a fraction of a second, with the last config that Serve wrote. HAProxy's launcher ends it before it
starts Serve's own (`ingress.loopback_launcher`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
RETRY_SECONDS = 1.0
CONNECT_SECONDS = 2.0
HANDOVER_SECONDS = 5.0
"""Serve's HAProxy has this long to listen, after the stand-in was ended for it."""
PID_FILE = "stand-in.pid"
_NOT_TAKEN = ("frontend prometheus", "listen stats")
"""Sections whose ports are for Serve's HAProxy."""


class IngressStandby:
    """Watches the ingress at `host`, `port`; `folder` holds HAProxy's files, of this machine alone."""

    def __init__(self, haproxy: Path, folder: Path, host: str, port: int) -> None:
        self._haproxy = haproxy
        self._folder = folder
        self._address = (host, port)
        self._stopped = threading.Event()
        self._stand_in: subprocess.Popen[bytes] | None = None
        # The stand-in dies with the thread that started it.
        self._thread = threading.Thread(target=self._watch, name="front-watch", daemon=True)

    def start(self) -> None:
        """Begin, with an ingress that is open."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch, and the stand-in."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(LOOK_SECONDS):
                try:
                    self._look()
                except OSError as error:
                    logger.warning("HAProxy is gone, and none could be started in its place: %s", error)
                    self._stopped.wait(RETRY_SECONDS)
        finally:
            self._end_stand_in()

    def _look(self) -> None:
        if self._stand_in is None:
            if self._is_closed():
                self._start_stand_in()
            return
        # In this order: the launcher removes the file, then ends the stand-in.
        ended = self._stand_in.poll() is not None
        if not (self._folder / PID_FILE).exists():
            # HAProxy's launcher wants its place. It may have read the file before there was a pid in it.
            self._end_stand_in()
            self._stopped.wait(HANDOVER_SECONDS)
        elif ended:
            # Ended by somebody else. Its pid may be another process's by the time that the launcher reads the file.
            self._end_stand_in()

    def _is_closed(self) -> bool:
        """Whether nobody listens; an ingress that is merely slow is open."""
        try:
            socket.create_connection(self._address, CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def _start_stand_in(self) -> None:
        configs = list(self._folder.glob("*/haproxy.cfg"))
        setpriv = shutil.which("setpriv")
        if not configs or setpriv is None:
            return
        config = self._folder / "stand-in.cfg"
        newest = max(configs, key=lambda path: path.stat().st_mtime)
        config.write_text(stand_in_config(newest.read_text(encoding="utf-8")), encoding="utf-8")
        logger.warning("HAProxy is gone; another stands in until Ray Serve has started its own")
        self._stand_in = subprocess.Popen(
            [setpriv, "--pdeathsig", "KILL", str(self._haproxy), "-db", "-f", str(config)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        (self._folder / PID_FILE).write_text(str(self._stand_in.pid), encoding="utf-8")

    def _end_stand_in(self) -> None:
        if self._stand_in is not None:
            self._stand_in.kill()
            self._stand_in.wait()
            self._stand_in = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder / PID_FILE)


def stand_in_config(config: str) -> str:
    """`config` of Serve's HAProxy without what only one process can have."""
    kept: list[str] = []
    section = ""
    for line in config.splitlines():
        if line and not line[0].isspace():
            section = line.strip()
        if section not in _NOT_TAKEN and not line.strip().startswith("stats socket"):
            kept.append(line)
    return "\n".join(kept) + "\n"
