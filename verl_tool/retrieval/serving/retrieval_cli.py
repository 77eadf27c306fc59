"""``python -m verl_tool.retrieval serve``: the retrieval server, from its start to its stop."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.markup import escape

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.http import command_options
from verl_tool.http.supervised_server import write_url_file
from verl_tool.retrieval.index import MAX_TOPK
from verl_tool.retrieval.manifest import Manifest
from verl_tool.retrieval.passage import RetrievalError
from verl_tool.retrieval.search_batcher import MAX_BATCH
from verl_tool.retrieval.serving.settings import APP_NAME, RetrievalSettings
from verl_tool.servers.server_console import console, describe_error, print_address
from verl_tool.servers.settings import new_server_name

START_SECONDS = 900.0
"""Deadline for the replicas to open the index, and to load its embedder."""


def serve(
    index: Annotated[Path, typer.Option("--index", help="Folder of the index.")],
    embedder: Annotated[
        str | None, typer.Option("--embedder", help="Where its model is here; default: where it was at the build.")
    ] = None,
    topk: Annotated[int, typer.Option("--topk", min=1, max=MAX_TOPK, help="Passages, if a request does not say.")] = 3,
    host: command_options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the server.")] = 8000,
    num_replicas: Annotated[int, typer.Option("--num_replicas", min=1, help="Processes that search.")] = 1,
    cpus_per_replica: Annotated[
        int | None,
        typer.Option("--cpus_per_replica", min=1, help="CPUs, and threads, of each. Default: its share of the cores."),
    ] = None,
    max_batch: Annotated[
        int, typer.Option("--max_batch", min=1, help="Queries that a replica searches together.")
    ] = MAX_BATCH,
    max_queued: Annotated[
        int, typer.Option("--max_queued", min=1, help="Queries in one replica beyond which it answers 503.")
    ] = 8192,
    request_timeout: Annotated[
        float, typer.Option("--request_timeout", min=0.1, help="Seconds after which a request is answered with 504.")
    ] = 60.0,
    api_key: Annotated[str | None, command_options.api_key_option("VERL_TOOL_RETRIEVAL_API_KEY")] = None,
    allowed_hosts: command_options.AllowedHosts = "",
    ray_address: command_options.RayAddress = None,
    app_name: command_options.AppName = APP_NAME,
    url_file: command_options.UrlFile = None,
    log_level: command_options.ReplicasLogLevel = command_options.LogLevel.INFO,
) -> None:
    """Serve an index over HTTP on Ray Serve, by Search-R1's POST /retrieve."""
    cpus = cpus_per_replica or max(1, (os.cpu_count() or 1) // num_replicas)
    try:
        # What is wrong with the index shows here, before any process is started.
        manifest = Manifest.load(index)
        settings = RetrievalSettings(
            index=str(index.resolve()),
            embedder=embedder,
            topk=topk,
            max_batch=max_batch,
            max_queued_queries=max_queued,
            request_timeout_seconds=request_timeout,
            api_key=api_key,
            server=new_server_name(app_name),
            app_name=app_name,
            listen_host=host,
            listen_port=port,
            allowed_hosts=command_options.host_names(allowed_hosts),
            several_nodes=ray_address is not None,
            log_level=log_level.value,
        )
        _serve(_Start(settings, manifest, num_replicas, cpus, ray_address, url_file))
    except (VerlToolError, ValidationError) as error:
        console.print(f"[bold red]cannot serve:[/bold red] {escape(describe_error(error))}", highlight=False)
        raise typer.Exit(2 if isinstance(error, (ConfigError, RetrievalError, ValidationError)) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@dataclass(frozen=True)
class _Start:
    settings: RetrievalSettings
    manifest: Manifest
    replicas: int
    cpus: int
    """Of each replica."""
    ray_address: str | None
    url_file: Path | None


def _serve(start: _Start) -> None:
    """Serve until told to stop. Raises VerlToolError."""
    # Ray takes a second to import, which the other commands do without.
    from verl_tool.retrieval.serving.deployment import DEPLOYMENT, application
    from verl_tool.servers.serve.running_server import Signals
    from verl_tool.servers.serve.serve_cluster import ServeCluster

    settings, replicas = start.settings, start.replicas
    assert settings.listen_port is not None
    signals = Signals()
    cluster = ServeCluster(
        host=settings.listen_host,
        port=settings.listen_port,
        ray_address=start.ray_address,
        logical_cpus=max(os.cpu_count() or 1, 2 * replicas * start.cpus + 1),
        app_name=settings.app_name,
        deployment=DEPLOYMENT,
    )
    with cluster:
        signals.install()
        cluster.serve_application(application(settings, replicas, start.cpus), START_SECONDS)
        cluster.wait_until_it_answers(lambda status, body: status == 200)
        words = f"{start.manifest.passages} passages, {start.manifest.settings.kind.value}"
        console.print(f"index       {settings.index} ({words})", highlight=False, soft_wrap=True)
        console.print(f"replicas    {replicas}, {start.cpus} thread(s) each", highlight=False)
        print_address(f"{cluster.url}/retrieve", settings.listen_host, settings.api_key)
        if start.url_file is not None:
            write_url_file(start.url_file, cluster.url)
        for _ in signals.looks():
            cluster.live_state()
        console.print("stopping; once more Ctrl-C: at once")
    console.print("stopped")
