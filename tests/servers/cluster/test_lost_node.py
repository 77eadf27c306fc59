"""A tool server over two nodes whose second is lost at one moment or another: the same command serves again.

A process of a few lines takes the training's part: it starts the server as a training does, calls a tool, and ends.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from two_nodes import NEEDS_NAMESPACES, PORT, Node, environment, start_second, two_node_cluster

pytestmark = [NEEDS_NAMESPACES, pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]

DRIVER = """
import asyncio, sys
from pathlib import Path
from verl_tool.client import ToolClient
from verl_tool.http.supervised_server import SupervisedServer, serve_command

folder, address, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
options = ["--ray_address", address, "--num_replicas", "2", "--cpus_per_replica", "9", "--workers_per_tool", "1"]
url_file = folder / "url"
command = serve_command("calculator", port, [*options, "--url_file", str(url_file)], app_name="verl_tool-a-run")

async def call(url):
    async with ToolClient(url, timeout=60.0, max_retries=20) as client:
        return await client.call("t", "<calculator>6*7</calculator>", step=0)

with SupervisedServer(command, f"http://127.0.0.1:{port}", folder / "server.log", url_file=url_file) as server:
    result = asyncio.run(call(server.url))
    print("answer", result.observation, result.fault, flush=True)
    sys.stdin.read()
"""
MOMENTS = ("starting", "serving", "stopping", "launcher killed", "resumed at once")


class Driver:
    """A process in the place of a training's driver."""

    def __init__(self, node: Node, folder: Path) -> None:
        folder.mkdir()
        self.log = folder / "driver.log"
        self._server_log = folder / "server.log"
        command = node.command(sys.executable, "-c", DRIVER, str(folder), f"{node.address}:{PORT}", "28901")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment(), stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
            )

    def printed(self) -> str:
        server = self._server_log.read_text(errors="replace") if self._server_log.exists() else ""
        return self.log.read_text(errors="replace") + server

    def wait_for(self, words: str, seconds: float = 200.0) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.printed():
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.2)

    def end(self) -> None:
        """As a training ends that lost a node: in order, or after a while by force."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


@contextmanager
def driver(node: Node, folder: Path) -> Iterator[Driver]:
    started = Driver(node, folder)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    with two_node_cluster(tmp_path_factory.mktemp("ray")) as both:
        yield both


def wait_for_replica(node: Node) -> None:
    deadline = time.monotonic() + 200
    while not any("ServeReplica" in title for title in node.titles()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_same_command_serves_again(nodes, tmp_path, moment):
    first, second = nodes
    with driver(first, tmp_path / "before") as before:
        if moment == "starting":
            wait_for_replica(second)
        else:
            before.wait_for("answer")
            assert "42" in before.printed()
        if moment == "stopping":
            before.process.stdin.close()
            time.sleep(0.5)
        if moment == "launcher killed":
            before.process.kill()
        second.lose()
        if moment == "resumed at once":
            before.end()
            start_second(nodes, tmp_path)
    if moment != "resumed at once":
        start_second(nodes, tmp_path)
    with driver(first, tmp_path / "after") as after:
        after.wait_for("answer")
        assert "42" in after.printed(), after.printed()
