"""``python -m verl_tool.servers.ray_serve``: the tool server from the command line."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.markup import escape

from verl_tool.errors import ConfigError, StartError, VerlToolError
from verl_tool.http import command_options
from verl_tool.servers.mcp.catalog import find_offers
from verl_tool.servers.mcp.config import McpConfig
from verl_tool.servers.replica.replica_parts import make_tools
from verl_tool.servers.server_console import check_servers, console, describe_error
from verl_tool.servers.settings import AutoscalingSettings, ReplicaSettings, new_server_name
from verl_tool.servers.tool_config import ToolConfig

APP_NAME = "verl_tool"

_MIN_OPEN_FILES = 1024
"""Of a process: Ray's processes and a replica's runs need hundreds."""


OF_RAY = (
    *("num_replicas", "max_replicas", "cpus_per_replica", "drain_seconds"),
    *("ray_address", "app_name"),
)
"""Options that are without meaning beside ``--embedded``."""


def serve_tools(
    context: typer.Context,
    host: command_options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the server.")] = 5000,
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
        str | None,
        typer.Option(
            "--tool_config", help="JSON with the sections tools, execution, security: a file, or the text itself."
        ),
    ] = None,
    mcp: Annotated[
        Path | None,
        typer.Option(
            "--mcp",
            help="JSON file of MCP servers, as MCP clients share it (mcpServers); their tools are served as "
            "mcp__server__tool. Needs the extra mcp.",
        ),
    ] = None,
    mcp_check: Annotated[
        bool,
        typer.Option("--mcp_check", help="List what each server of --mcp offers, and end; 1 if one cannot be reached."),
    ] = False,
    api_key: Annotated[str | None, command_options.api_key_option("VERL_TOOL_API_KEY")] = None,
    allowed_hosts: command_options.AllowedHosts = "",
    ray_address: command_options.RayAddress = None,
    app_name: command_options.AppName = APP_NAME,
    url_file: command_options.UrlFile = None,
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
    log_level: command_options.ReplicasLogLevel = command_options.LogLevel.INFO,
    embedded: Annotated[
        bool,
        typer.Option(
            "--embedded",
            help="Serve from this one process, without Ray: one replica, up in a second or two, for notebooks and "
            "trainings on one machine. The options of replicas and of the cluster are refused beside it.",
        ),
    ] = False,
) -> None:
    """Serve tools over HTTP on Ray Serve.

    Example: python -m verl_tool.servers.ray_serve --tool_type python_code,calculator --port 5000

    Stop it with Ctrl-C. SIGUSR1 reads the configs and your tool files anew and replaces the replicas one by one.
    """

    server = new_server_name(app_name)
    if embedded:
        # The variable RAY_ADDRESS may be there for other programs.
        ray_address = None

    def settings_now() -> ReplicaSettings:
        servers = McpConfig.from_file(mcp) if mcp else None
        return ReplicaSettings(
            app_name=app_name,
            server=server,
            tool_type=tool_type,
            tool_config=ToolConfig.from_cli(tool_config) if tool_config else None,
            mcp=servers,
            mcp_offers=find_offers(servers, isolation) if servers else (),
            workers_per_tool=workers_per_tool or _workers(num_replicas, ray_address),
            isolation=isolation,
            max_concurrent_requests=max_concurrent_requests,
            max_queued_requests=max_queued_requests,
            request_timeout_seconds=request_timeout,
            state_ttl_seconds=state_ttl,
            drain_seconds=drain_seconds,
            done_if_invalid=done_if_invalid,
            api_key=api_key,
            listen_host=host,
            listen_port=port,
            allowed_hosts=command_options.host_names(allowed_hosts),
            several_nodes=ray_address is not None,
            log_level=log_level.value,
        )

    try:
        if mcp_check:
            if mcp is None:
                raise ConfigError("--mcp_check looks at the servers of --mcp; give that file")
            raise typer.Exit(0 if check_servers(McpConfig.from_file(mcp), isolation) else 1)
        if embedded:
            _reject_alongside_embedded(context)
        _ensure_open_files()
        replicas = _replicas(num_replicas, max_replicas)
        # What is wrong with the tools shows here, before any process is started.
        first = settings_now()
        make_tools(first)
        if embedded:
            from verl_tool.servers.embedded import run_embedded

            run_embedded(first, url_file)
            return
        # Ray takes a second to import, which an embedded server does without.
        from verl_tool.servers.serve.running_server import run_server
        from verl_tool.servers.serve.serve_cluster import ServeCluster

        cluster = ServeCluster(
            host=host,
            port=port,
            ray_address=ray_address,
            logical_cpus=_logical_cpus(replicas, cpus_per_replica),
            app_name=app_name,
        )
        run_server(cluster, first, settings_now, replicas, cpus_per_replica, url_file)
    except (VerlToolError, ValidationError) as error:
        console.print(f"[bold red]cannot serve:[/bold red] {escape(describe_error(error))}", highlight=False)
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
    limit = replicas.max_replicas if isinstance(replicas, AutoscalingSettings) else replicas
    # In a rolling update the old ones stay for the trajectories that live in them.
    return max(os.cpu_count() or 1, math.ceil(2 * limit * cpus_per_replica) + 1)


def _ensure_open_files() -> None:
    """See that this process may open enough files, and raise the soft limit to that.

    Raises:
        StartError: the hard limit is too low for Ray.
    """
    soft, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < _MIN_OPEN_FILES:
        raise StartError(
            f"a process may open {limit} files here (`ulimit -n`), the server needs {_MIN_OPEN_FILES}; raise the limit"
        )
    if soft < _MIN_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MIN_OPEN_FILES, limit))


def _reject_alongside_embedded(context: typer.Context) -> None:
    """Raises ConfigError for an option of replicas or of the cluster that was given."""
    for name in OF_RAY:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"--embedded is one process without Ray, and --{name} is about replicas on it; leave one out"
            )


if __name__ == "__main__":
    main()
