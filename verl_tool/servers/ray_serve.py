"""``python -m verl_tool.servers.ray_serve``: the tool server from the command line."""

from __future__ import annotations

import http.client
import importlib.util
import json
import math
import os
import resource
import shlex
import signal
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated
from urllib.parse import urlsplit

import ray
import typer
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.servers.serve.deployment import LOOPBACK, ReplicaDescription, make_tools
from verl_tool.servers.serve.ingress import find_ingress_mode
from verl_tool.servers.serve.serve_cluster import ServeCluster, StartError, wait_until
from verl_tool.servers.settings import AutoscalingSettings, ReplicaSettings, new_peer_key, new_server_name
from verl_tool.servers.tool_config import ToolConfig
from verl_tool.servers.tools import inactive_tools
from verl_tool.servers.tools.base import Tool

APP_NAME = "verl_tool"
INGRESS_SECONDS = 30.0
"""Deadline for the ingress to find a replica."""
LOOK_SECONDS = 5.0
"""How often the running server looks whether its cluster is still there."""

console = Console(stderr=True)

_LEAST_OPEN_FILES = 1024
"""Of a process: HAProxy, Ray's processes and a replica's runs need hundreds."""


class LogLevel(str, Enum):
    """Levels of the standard library."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


class Signals:
    """What the operator asks of the running server.

    SIGINT or SIGTERM: stop; a second one, or one before the server serves: at once. SIGUSR1: a rolling update with the
    tool files as they are now.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.serving = False
        self.stop = False
        self._update = False

    def install(self) -> None:
        """Handle the signals from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_update)

    def wait(self, seconds: float) -> None:
        """Return at a signal, or after `seconds`."""
        self._event.wait(seconds)
        self._event.clear()

    def take_update(self) -> bool:
        """Whether an update was asked for since the last look."""
        asked, self._update = self._update, False
        return asked

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop or not self.serving:
            console.print("[bold]stopping at once[/bold]")
            raise KeyboardInterrupt
        self.stop = True
        self._event.set()

    def _on_update(self, number: int, frame: FrameType | None) -> None:
        self._update = True
        self._event.set()


def run_server(
    cluster: ServeCluster,
    settings_now: Callable[[], ReplicaSettings],
    replicas: int | AutoscalingSettings,
    cpus_per_replica: float,
    url_file: Path | None = None,
) -> None:
    """Serve until told to stop. `settings_now` reads the settings anew for every update. Raises VerlToolError."""
    signals = Signals()
    signals.install()
    settings = settings_now()
    with cluster:
        # Ray has put its own handler of SIGTERM in the place of ours.
        signals.install()
        cluster.deploy(settings, replicas, cpus_per_replica=cpus_per_replica)
        wait_until(lambda: _ingress_answers(cluster.url), INGRESS_SECONDS, f"an answer of {cluster.url}/health")
        cluster.watch_front()
        _print_table(cluster, settings)
        if url_file is not None:
            _write_whole(url_file, cluster.url)
        signals.serving = True
        while not signals.stop:
            signals.wait(LOOK_SECONDS)
            if signals.take_update():
                _update(cluster, settings_now, replicas, cpus_per_replica)
            elif not signals.stop:
                _check_cluster(cluster)
        console.print("stopping; once more Ctrl-C: at once")
    console.print("stopped")


def serve_tools(
    host: Annotated[
        str, typer.Option("--host", help="Address of the ingress. 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the ingress.")] = 5000,
    tool_type: Annotated[
        str,
        typer.Option("--tool_type", help="Tools to serve, separated by commas: names, or paths of your own .py files."),
    ] = "",
    num_replicas: Annotated[
        str,
        typer.Option(
            "--num_replicas", help="Replicas, each with its own sandbox: a number, or 'auto' to follow the queue."
        ),
    ] = "1",
    max_replicas: Annotated[int, typer.Option("--max_replicas", min=1, help="With --num_replicas auto: the most.")] = 8,
    workers_per_tool: Annotated[
        int | None,
        typer.Option(
            "--workers_per_tool", min=1, help="Warm sandbox workers of each replica. Default: its share of the cores."
        ),
    ] = None,
    max_concurrent_requests: Annotated[
        int,
        typer.Option("--max_concurrent_requests", min=1, help="Trajectories' calls that one replica runs at a time."),
    ] = 256,
    max_queued_requests: Annotated[
        int, typer.Option("--max_queued_requests", min=1, help="Calls that wait in one replica before it answers 503.")
    ] = 4096,
    tool_config: Annotated[
        Path | None, typer.Option("--tool_config", help="JSON file with the sections tools, execution, security.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api_key",
            envvar="VERL_TOOL_API_KEY",
            show_envvar=True,
            help="Bearer token that every request must bring. Every user of this machine can read a command line (ps): "
            "prefer the variable.",
        ),
    ] = None,
    allowed_hosts: Annotated[
        str,
        typer.Option(
            "--allowed_hosts",
            help="Further names by which clients may call a server on a loopback address, separated by commas, each "
            "with a port or for all ports. Web pages that call it by another name are refused.",
        ),
    ] = "",
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray_address",
            envvar="RAY_ADDRESS",
            show_envvar=True,
            help="Ray cluster to join, such as 'auto'. Default: start a local one.",
        ),
    ] = None,
    app_name: Annotated[
        str, typer.Option("--app_name", help="Name of the server on its Ray cluster; each server there has its own.")
    ] = APP_NAME,
    route_prefix: Annotated[
        str | None,
        typer.Option(
            "--route_prefix",
            help="Path of the server below the ingress. Default: /, or /APP_NAME where Ray Serve runs already.",
        ),
    ] = None,
    url_file: Annotated[
        Path | None, typer.Option("--url_file", help="File into which the server's base URL is written once it serves.")
    ] = None,
    cpus_per_replica: Annotated[
        float, typer.Option("--cpus_per_replica", min=0.0, help="CPUs that Ray reserves for a replica.")
    ] = 1.0,
    done_if_invalid: Annotated[
        bool, typer.Option("--done_if_invalid", help="End a trajectory whose action holds no call.")
    ] = False,
    isolation: Annotated[
        str | None,
        typer.Option("--isolation", help="Lowest level of isolation to accept; below it the server does not start."),
    ] = None,
    state_ttl: Annotated[
        float, typer.Option("--state_ttl", min=1.0, help="Seconds after which an idle trajectory's state is freed.")
    ] = 3600.0,
    request_timeout: Annotated[
        float,
        typer.Option(
            "--request_timeout", min=1.0, help="Seconds after which a call is answered with the fault 'timeout'."
        ),
    ] = 300.0,
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain_seconds", min=0.1, help="The longest that a replica taken away waits for its trajectories to end."
        ),
    ] = 60.0,
    log_level: Annotated[LogLevel, typer.Option("--log_level", help="What the replicas log.")] = LogLevel.INFO,
) -> None:
    """Serve tools over HTTP on Ray Serve.

    Example: python -m verl_tool.servers.ray_serve --tool_type python_code,calculator --port 5000

    Stop it with Ctrl-C. SIGUSR1 reads the tool config and your tool files anew and replaces the replicas one by one.
    """

    peer_key, server = new_peer_key(), new_server_name(app_name)

    def settings_now() -> ReplicaSettings:
        return ReplicaSettings(
            app_name=app_name,
            server=server,
            tool_type=tool_type,
            tool_config=ToolConfig.from_file(tool_config) if tool_config else None,
            workers_per_tool=workers_per_tool or _workers(num_replicas, ray_address),
            isolation=isolation,
            max_concurrent_requests=max_concurrent_requests,
            max_queued_requests=max_queued_requests,
            request_timeout_seconds=request_timeout,
            state_ttl_seconds=state_ttl,
            drain_seconds=drain_seconds,
            done_if_invalid=done_if_invalid,
            api_key=api_key,
            peer_key=peer_key,
            front_host=host,
            front_port=port,
            allowed_hosts=tuple(name.strip() for name in allowed_hosts.split(",") if name.strip()),
            several_nodes=ray_address is not None,
            log_level=log_level.value,
        )

    try:
        _ensure_open_files()
        replicas = _replicas(num_replicas, max_replicas)
        # What is wrong with the tools shows here, before any process is started.
        make_tools(settings_now())
        cluster = ServeCluster(
            host=host,
            port=port,
            ingress_mode=find_ingress_mode(),
            ray_address=ray_address,
            logical_cpus=_logical_cpus(replicas, cpus_per_replica),
            app_name=app_name,
            route_prefix=route_prefix,
            request_timeout_seconds=request_timeout,
        )
        run_server(cluster, settings_now, replicas, cpus_per_replica, url_file)
    except (VerlToolError, ValidationError) as error:
        console.print(f"[bold red]cannot serve:[/bold red] {escape(_words(error))}", highlight=False)
        raise typer.Exit(2 if isinstance(error, (ConfigError, ValidationError)) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def main() -> None:
    """Entry point of the command ``verl-tool-server``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(serve_tools)
    app()


def _replicas(text: str, most: int) -> int | AutoscalingSettings:
    if text == "auto":
        return AutoscalingSettings(max_replicas=most)
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--num_replicas is {text!r}; give a number from 1, or 'auto'")
    return int(text)


def _workers(num_replicas: str, ray_address: str | None) -> int | None:
    """The replicas of a local cluster share the cores of this machine; None: the tool's own default."""
    if ray_address is not None or not num_replicas.isdigit():
        return None
    return max(1, (os.cpu_count() or 1) // max(1, int(num_replicas)))


def _logical_cpus(replicas: int | AutoscalingSettings, cpus_per_replica: float) -> int:
    """A local cluster offers as many CPUs as its replicas ask for, so that they all find a place."""
    most = replicas.max_replicas if isinstance(replicas, AutoscalingSettings) else replicas
    # In a rolling update the old ones stay for the trajectories that live in them.
    return max(os.cpu_count() or 1, math.ceil(2 * most * cpus_per_replica) + 1)


def _ensure_open_files() -> None:
    """See that this process may open enough files, and raise the soft limit to that.

    Raises:
        StartError: the hard limit is too low for Ray and its proxy.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < _LEAST_OPEN_FILES:
        raise StartError(
            f"a process may open {most} files here (`ulimit -n`), the server needs {_LEAST_OPEN_FILES}; raise the limit"
        )
    if soft < _LEAST_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_LEAST_OPEN_FILES, most))


def _words(error: VerlToolError | ValidationError) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"--{'.'.join(str(part) for part in problem['loc'])} is {problem['input']!r}: {problem['msg']}"
    return str(error)


def _ingress_answers(url: str) -> bool:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5.0)
    try:
        connection.request("GET", f"{address.path}/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _write_whole(path: Path, text: str) -> None:
    """So that a reader finds all of it or nothing."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


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
        console.print(f"[bold red]not updated:[/bold red] {escape(_words(error))}", highlight=False)
    else:
        console.print("updated")


def _check_cluster(cluster: ServeCluster) -> None:
    try:
        state = cluster.state(cluster.app_name)
    except RayError as error:
        raise StartError(f"the Ray cluster is gone: {error}") from error
    if state in ("NOT_STARTED", "DELETING"):
        raise StartError(f"somebody took the application {cluster.app_name!r} off the cluster (it is {state})")


def _print_table(cluster: ServeCluster, settings: ReplicaSettings) -> None:
    description: ReplicaDescription = serve.get_app_handle(cluster.app_name).describe.remote().result(timeout_s=30.0)
    table = Table("tool", "serves", "how it is called", title="verl-tool")
    tools = make_tools(settings)
    for tool in tools:
        example = tool.example_actions[0] if tool.example_actions else ""
        table.add_row(tool.name, "[green]yes[/green]", example.replace("[", "\\["))
    for absent in inactive_tools(tools, settings.tool_config):
        table.add_row(absent.name, "no", absent.why)
    console.print(table)
    nodes = len([node for node in ray.nodes() if node["Alive"]])
    where = "a local Ray cluster" if cluster.local else f"a Ray cluster of {nodes} node(s), as {cluster.app_name!r}"
    console.print(f"isolation   {description.isolation or 'none needed: no tool runs code'}", highlight=False)
    path = "that of the Ray Serve which ran already" if cluster.joined_serve else cluster.ingress_mode.describe()
    console.print(f"ingress     {path}", highlight=False)
    console.print(f"runs on     {where}", highlight=False)
    if cluster.host not in LOOPBACK and settings.api_key is None:
        console.print(f"[bold yellow]open to the network[/bold yellow] ({cluster.host}) without --api_key")
    console.print(f"serves at   {cluster.url}/get_observation", highlight=False)
    if tried := way_to_try(tools, f"{cluster.url}/get_observation"):
        console.print(f"try         {tried}", soft_wrap=True, highlight=False, markup=False)


def way_to_try(tools: Sequence[Tool], url: str) -> str:
    """A command that asks the first tool: its check, if it has one here, else one of its examples."""
    first = tools[0]
    check = f"verl_tool.servers.tests.test_{first.name}_tool"
    if importlib.util.find_spec(check) is not None:
        return f"python -m {check} {'python ' if first.name == 'python_code' else ''}--url={url}"
    if not first.example_actions:
        return ""
    body = json.dumps({"trajectory_ids": ["a"], "actions": [first.example_actions[0]]}, ensure_ascii=False)
    return f"curl -s {url} -d {shlex.quote(body)}"


if __name__ == "__main__":
    main()
