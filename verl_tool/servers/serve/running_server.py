"""The tool server on Ray Serve, from its start to its stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import ray
from pydantic import ValidationError
from ray import serve
from rich.markup import escape

from verl_tool.errors import VerlToolError
from verl_tool.http.supervised_server import write_url_file
from verl_tool.servers.replica.replica_parts import make_tools
from verl_tool.servers.serve.serve_cluster import ServeCluster
from verl_tool.servers.server_console import console, describe_error, print_start_table
from verl_tool.servers.settings import AutoscalingSettings, ReplicaSettings

LOOK_SECONDS = 5.0
"""How often the running server looks whether its cluster is still there."""


class Signals:
    """What the operator asks of the running server.

    SIGINT or SIGTERM: stop; a second one, or one before the server serves: at once. SIGUSR1: a rolling update with the
    tool files as they are now.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._serving = False
        self._stop = False
        self._update = False
        self.install()

    def install(self) -> None:
        """Handle the signals from now on. Once more after ``ray.init``, which handles SIGTERM itself."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_update)

    def looks(self) -> Iterator[None]:
        """The server serves: yield every `LOOK_SECONDS`, and at an update, until it is told to stop."""
        self._serving = True
        while not self._stop:
            self._event.wait(LOOK_SECONDS)
            self._event.clear()
            if not self._stop:
                yield

    def take_update(self) -> bool:
        """Whether an update was asked for since the last look."""
        requested, self._update = self._update, False
        return requested

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop or not self._serving:
            console.print("[bold]stopping at once[/bold]")
            raise KeyboardInterrupt
        self._stop = True
        self._event.set()

    def _on_update(self, number: int, frame: FrameType | None) -> None:
        self._update = True
        self._event.set()


def run_server(
    cluster: ServeCluster,
    settings: ReplicaSettings,
    settings_now: Callable[[], ReplicaSettings],
    replicas: int | AutoscalingSettings,
    cpus_per_replica: float,
    url_file: Path | None = None,
) -> None:
    """Serve until told to stop. `settings_now` reads `settings` anew for every update. Raises VerlToolError."""
    signals = Signals()
    with cluster:
        signals.install()
        cluster.deploy(settings, replicas, cpus_per_replica=cpus_per_replica)
        cluster.wait_until_it_answers(lambda status, body: status == 200)
        _print_table(cluster, settings)
        if url_file is not None:
            write_url_file(url_file, cluster.url)
        for _ in signals.looks():
            if signals.take_update():
                _update(cluster, settings_now, replicas, cpus_per_replica)
            else:
                cluster.live_state()
        console.print("stopping; once more Ctrl-C: at once")
    console.print("stopped")


def _update(
    cluster: ServeCluster,
    settings_now: Callable[[], ReplicaSettings],
    replicas: int | AutoscalingSettings,
    cpus_per_replica: float,
) -> None:
    """A rolling update; if it is not possible the server goes on as it was."""
    console.print("updating: replicas are replaced one by one")
    try:
        settings = settings_now()
        make_tools(settings)
        cluster.deploy(settings, replicas, cpus_per_replica=cpus_per_replica)
    except (VerlToolError, ValidationError) as error:
        console.print(f"[bold red]not updated:[/bold red] {escape(describe_error(error))}", highlight=False)
    else:
        console.print("updated")


def _print_table(cluster: ServeCluster, settings: ReplicaSettings) -> None:
    isolation: str = serve.get_app_handle(cluster.app_name).describe.remote().result(timeout_s=30.0)
    nodes = len([node for node in ray.nodes() if node["Alive"]])
    joined = f"a Ray cluster of {nodes} node(s), as {cluster.app_name!r}"
    print_start_table(
        settings,
        isolation=isolation,
        runs_on="a local Ray cluster" if cluster.local else joined,
        url=cluster.url,
    )
