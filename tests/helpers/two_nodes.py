"""Two Ray nodes on this machine that behave like two machines: network namespaces with a cable between them.

Each has its own loopback and address, so one node cannot reach what listens on 127.0.0.1 of the other. Needs root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

NEEDS_NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"
)
DEVICE = "vt0"
PORT = 6379
TOKEN = secrets.token_hex(32)


@dataclass(frozen=True)
class Node:
    """A network namespace with a Ray node in it."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` on this node."""
        return ["ip", "netns", "exec", self.name, *words]

    def start_ray(self, folder: Path, *options: str) -> None:
        """Run ``ray start`` with resources for one training process. Returns when the node is up."""
        resources = ("--num-cpus", "16", "--num-gpus", "1", "--object-store-memory", "300000000")
        words = (sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address", self.address, *resources)
        log = folder / f"{self.name}.log"
        with log.open("ab") as output:
            done = subprocess.run(
                self.command(*words, *options), env=environment(), stdout=output, stderr=output, timeout=180
            )
        assert done.returncode == 0, log.read_text()[-3000:]

    def titles(self) -> set[str]:
        """Return command lines of all processes on this node."""
        return {title for pid in self.pids() if (title := _title(pid))}

    def pids(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=10)
        return [int(pid) for pid in listed.stdout.split()]

    def lose(self) -> None:
        """Kill all processes on this node, like a power failure."""
        while pids := self.pids():
            for pid in pids:
                _kill(pid)
            time.sleep(0.1)


def environment() -> dict[str, str]:
    """Return the environment of Ray's processes: one token for the cluster, and gloo's network device, since the nodes
    share a name."""
    dropped = ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    return kept | token | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Make two namespaces with a cable between them. Their processes are killed at the end."""
    first, second = (Node(f"vt{os.getpid()}{end}", f"10.77.0.{number}") for number, end in enumerate("ab", 1))
    with ExitStack() as stack:
        for node in (first, second):
            _ip("netns", "add", node.name)
            stack.callback(_ip, "netns", "delete", node.name)
            stack.callback(node.lose)
        peer = ("type", "veth", "peer", "name", DEVICE, "netns", second.name)
        _ip("link", "add", "name", DEVICE, "netns", first.name, *peer)
        for node, other in ((first, second), (second, first)):
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", node.name, "link", "set", device, "up")
            # Programs ask which address they would reach the world from, and send nothing there.
            _ip("-n", node.name, "route", "add", "default", "via", other.address)
        yield first, second


def start_second(nodes: tuple[Node, Node], folder: Path) -> None:
    nodes[1].start_ray(folder, "--address", f"{nodes[0].address}:{PORT}")


@contextmanager
def two_node_cluster(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Start a Ray cluster on two nodes."""
    with two_nodes() as (first, second):
        head = ("--head", "--port", str(PORT), "--include-dashboard", "false", "--temp-dir", f"/tmp/vt{os.getpid()}")
        first.start_ray(folder, *head)
        start_second((first, second), folder)
        yield first, second
    shutil.rmtree(f"/tmp/vt{os.getpid()}", ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
