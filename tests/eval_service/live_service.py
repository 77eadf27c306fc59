"""The service as a user starts it: `python -m eval_service.app` in a process of its own, with a real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from listeners import Listeners

from verl_tool.servers.serve.ports import free_ports

ROOT = Path(__file__).parents[2]
START_SECONDS = 600.0
STOP_SECONDS = 120.0


@dataclass
class LiveService:
    """One running service."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())

    def metric(self, name: str) -> float:
        """One sample of ``/metrics``."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")))

    def wait_for(self, name: str, value: float, seconds: float = 60.0) -> None:
        """Return once a metric has a value."""
        deadline = time.monotonic() + seconds
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)} and not {value} after {seconds} s"
            time.sleep(0.2)


@contextmanager
def live_service(arguments: Sequence[str], folder: Path) -> Iterator[LiveService]:
    """A service with these arguments, for as long as the block runs. Its log goes into `folder`.

    No process of it may listen where others reach it, at any moment.
    """
    (port,) = free_ports(1)
    log = folder / "service.log"
    command = [sys.executable, "-m", "eval_service.app", "--port", str(port), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(ROOT)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
        )
    service = LiveService(f"http://127.0.0.1:{port}", process, log)
    try:
        with Listeners(process.pid) as listeners:
            _wait_until_it_serves(service)
            yield service
    finally:
        stop(service)
    assert listeners.on_loopback
    assert listeners.open_to_others == []


def stop(service: LiveService) -> int:
    """As Ctrl-C does; its exit code."""
    if service.process.poll() is None:
        service.process.send_signal(signal.SIGINT)
    try:
        return service.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(service.process.pid, signal.SIGKILL)
        raise


def _wait_until_it_serves(service: LiveService) -> None:
    deadline = time.monotonic() + START_SECONDS
    while b"serves at" not in service.log.read_bytes():
        words = service.log.read_text(errors="replace")[-3000:]
        assert service.process.poll() is None, f"it ended with {service.process.returncode}: {words}"
        assert time.monotonic() < deadline, f"not up after {START_SECONDS} s: {words}"
        time.sleep(0.5)
    try:
        assert service.get("/health")["status"] == "healthy"
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read()) from error
