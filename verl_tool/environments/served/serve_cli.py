"""Commands that serve our tools and tasks to other systems.

python -m verl_tool.environments serve openenv --tool_server URL --rows rows.parquet --reward_manager gsm8k
python -m verl_tool.environments serve nemo_gym --tool_server URL --rows rows.parquet --reward_manager gsm8k
python -m verl_tool.environments nemo_gym_rows --tool_server URL --rows rows.parquet --output rows.jsonl
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from starlette.types import ASGIApp

from verl_tool.agent_workers.reward_manager.grading.cli_inputs import parse_options
from verl_tool.agent_workers.reward_manager.grading.manager_process import UnusableError
from verl_tool.client import ToolClient
from verl_tool.environments.served.episode import EpisodeLimits, ServedEpisodes
from verl_tool.environments.served.nemo_gym import NemoGymApp, write_rows
from verl_tool.environments.served.openenv import MAX_MESSAGE_BYTES, OpenEnvApp
from verl_tool.environments.served.ors import OrsApp
from verl_tool.environments.served.row_grader import RowGrader
from verl_tool.environments.served.task_rows import TaskRows
from verl_tool.errors import StartError, VerlToolError
from verl_tool.http import command_options
from verl_tool.http.host_check import HostCheck
from verl_tool.http.listening_socket import listen_at
from verl_tool.http.supervised_server import write_url_file
from verl_tool.servers.cluster.direct_server import DirectServer
from verl_tool.servers.server_console import console, print_address

CLOSE_SECONDS = 5.0


class ServedProtocol(str, Enum):
    """Protocols in which our tools are served."""

    OPENENV = "openenv"
    NEMO_GYM = "nemo_gym"
    ORS = "ors"


_APPS: dict[ServedProtocol, type[OpenEnvApp] | type[NemoGymApp] | type[OrsApp]] = {
    ServedProtocol.OPENENV: OpenEnvApp,
    ServedProtocol.NEMO_GYM: NemoGymApp,
    ServedProtocol.ORS: OrsApp,
}


@dataclass(frozen=True)
class ServedSettings:
    """What one adapter process serves, and where."""

    protocol: ServedProtocol
    tool_server: str
    rows: Path | None = None
    reward_manager: str | None = None
    reward_options: dict[str, Any] = field(default_factory=dict)
    grader_processes: int = 1
    name: str = "verl_tool"
    host: str = "127.0.0.1"
    port: int = 8100
    allowed_hosts: tuple[str, ...] = ()
    api_key: str | None = None
    tool_server_api_key: str | None = None
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)


@contextlib.asynccontextmanager
async def open_episodes(settings: ServedSettings) -> AsyncIterator[ServedEpisodes]:
    """The episodes of an adapter process. Raises VerlToolError if they cannot be served."""
    rows = None if settings.rows is None else await asyncio.to_thread(TaskRows, settings.rows)
    grader = RowGrader(settings.reward_manager, settings.reward_options, processes=settings.grader_processes)
    client = ToolClient(
        settings.tool_server, api_key=settings.tool_server_api_key, timeout=settings.limits.call_seconds
    )
    async with client:
        episodes = ServedEpisodes(client, settings.limits, rows, grader)
        try:
            await episodes.start()
            yield episodes
        finally:
            await episodes.close()


def make_served_app(settings: ServedSettings, episodes: ServedEpisodes, port: int) -> ASGIApp:
    """The application that speaks the protocol, at `port`."""
    host_check = HostCheck(settings.host, port, settings.allowed_hosts, has_key=settings.api_key is not None)
    return _APPS[settings.protocol](episodes, name=settings.name, api_key=settings.api_key, host_check=host_check)


@contextlib.asynccontextmanager
async def serving(settings: ServedSettings) -> AsyncIterator[str]:
    """Serve within the block, at the URL that it is given. Raises VerlToolError if that cannot be done."""
    try:
        listener = listen_at(settings.host, settings.port)
    except OSError as error:
        words = f"{settings.host}:{settings.port} cannot be listened on ({error}); choose another --host or --port"
        raise StartError(words) from error
    server = DirectServer(listener, max_message_bytes=MAX_MESSAGE_BYTES)
    try:
        async with open_episodes(settings) as episodes:
            await server.open(make_served_app(settings, episodes, listener.getsockname()[1]))
            try:
                yield server.url
            finally:
                await server.close(CLOSE_SECONDS)
    finally:
        listener.close()


async def _serve(settings: ServedSettings, url_file: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(settings) as url:
        print_address(url, settings.host, settings.api_key)
        if url_file is not None:
            write_url_file(url_file, url)
        await stop.wait()
    console.print("stopped")


ToolServer = Annotated[str, typer.Option("--tool_server", help="Base URL of the tool server.")]
ToolServerKey = Annotated[
    str | None,
    typer.Option("--tool_server_api_key", envvar="VERL_TOOL_API_KEY", show_envvar=True, help="The tool server's."),
]


def serve(
    protocol: Annotated[ServedProtocol, typer.Argument(help="What the other system speaks.")],
    tool_server: ToolServer,
    rows: Annotated[
        Path | None, typer.Option("--rows", help="Tasks: rows with verl's columns, .parquet or .jsonl.")
    ] = None,
    reward_manager: Annotated[
        str | None,
        typer.Option("--reward_manager", help="Grades rows without a verifier: a name, or the path of a .py file."),
    ] = None,
    reward_option: Annotated[
        list[str] | None, typer.Option("--reward_option", help="An option of the manager, name=value. Repeatable.")
    ] = None,
    grader_processes: Annotated[
        int, typer.Option("--grader_processes", min=1, help="Processes of the manager, each with one answer at a time.")
    ] = 1,
    name: Annotated[str, typer.Option("--name", help="Name of the environment.")] = "verl_tool",
    host: command_options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8100,
    allowed_hosts: command_options.AllowedHosts = "",
    api_key: Annotated[str | None, command_options.api_key_option("VERL_TOOL_ENVIRONMENT_API_KEY")] = None,
    tool_server_api_key: ToolServerKey = None,
    max_episodes: Annotated[int, typer.Option("--max_episodes", min=1, help="Sessions at a time.")] = 1024,
    idle_seconds: Annotated[
        float, typer.Option("--idle_seconds", min=1.0, help="A session that nobody used for so long is closed.")
    ] = 3600.0,
    call_seconds: Annotated[float, typer.Option("--call_seconds", min=1.0, help="Deadline of one call.")] = 300.0,
    url_file: command_options.UrlFile = None,
) -> None:
    """Serve a tool server's tools, and tasks on them, to another system."""
    limits = EpisodeLimits(max_episodes=max_episodes, idle_seconds=idle_seconds, call_seconds=call_seconds)
    with _errors():
        logging.basicConfig(level="INFO")
        settings = ServedSettings(
            protocol,
            tool_server,
            rows,
            reward_manager,
            parse_options(reward_option or []),
            grader_processes,
            name,
            host,
            port,
            command_options.host_names(allowed_hosts),
            api_key,
            tool_server_api_key,
            limits,
        )
        uvloop.run(_serve(settings, url_file))


def nemo_gym_rows(
    tool_server: ToolServer,
    rows: Annotated[Path, typer.Option("--rows", help="Rows with verl's columns, .parquet or .jsonl.")],
    output: Annotated[Path, typer.Option("--output", help="NeMo-Gym's rows, .jsonl.")],
    agent: Annotated[str, typer.Option("--agent", help="Name of the agent in NeMo-Gym's configuration.")] = (
        "verl_tool_simple_agent"
    ),
    tool_server_api_key: ToolServerKey = None,
) -> None:
    """Write rows for NeMo-Gym: the prompt, the tools, and the number of the row. The ground truth stays here."""

    async def write() -> int:
        async with ToolClient(tool_server, api_key=tool_server_api_key) as client:
            return write_rows(TaskRows(rows), await client.tools(), output, agent)

    with _errors():
        console.print(f"{asyncio.run(write())} rows in {output}", highlight=False)


def add_commands(app: typer.Typer) -> None:
    """Add the commands to those of ``python -m verl_tool.environments``."""
    app.command("serve")(serve)
    app.command("nemo_gym_rows")(nemo_gym_rows)


@contextlib.contextmanager
def _errors() -> Any:
    """Print an error of ours, and exit with 1."""
    try:
        yield
    except (VerlToolError, UnusableError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
