"""``python -m verl_tool.viewer``: look at runs in a browser.

python -m verl_tool.viewer outputs --open
"""

from __future__ import annotations

import os
import shlex
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from rich.console import Console
from rich.markup import escape

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.http.command_options import AllowedHosts, host_names
from verl_tool.http.host_check import HostCheck
from verl_tool.viewer.branch_jobs import BranchJobs
from verl_tool.viewer.endpoint_proxy import KEY_VARIABLE, EndpointProxy
from verl_tool.viewer.run_watch import RunWatch
from verl_tool.viewer.static_copy import write_copy
from verl_tool.viewer.token_texts import TokenTexts
from verl_tool.viewer.viewer_app import application

HOST = "127.0.0.1"
STOP_SECONDS = 2
"""How long Ctrl-C waits for answers that are being written."""
console = Console(stderr=True)


def command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders with runs below them, runs, or files of records. Default: outputs."),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="On 127.0.0.1; 0: a free one.")] = 5050,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="Folder with a tokenizer.json. Default: that of each run's model."),
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", help="Folder for the indexes. Default: beside the records.")
    ] = None,
    allowed_hosts: AllowedHosts = "",
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            help="OpenAI API of an eval endpoint, such as http://127.0.0.1:8000/v1, to talk to in the page Live. Its "
            f"API key is read from {KEY_VARIABLE}.",
        ),
    ] = None,
    branch: Annotated[
        bool,
        typer.Option("--branch", help="Pages may go on from turns: tools and the run's model run here."),
    ] = False,
    branch_options: Annotated[
        str,
        typer.Option("--branch_options", help="Of verl_tool.replay.branch, for --branch: such as '--temperature 1'."),
    ] = "",
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Write the runs into this folder, as pages without a server."),
    ] = None,
    export_files: Annotated[
        int, typer.Option("--export_files", min=0, help="Of each run so many files of records, the last ones; 0: all.")
    ] = 20,
) -> None:
    """Look at runs in a browser: curves, trajectories, tokens. Only the index changes; --branch adds branches."""
    try:
        if export is not None and (endpoint is not None or branch):
            raise ConfigError("--export writes pages without a server, for which --endpoint and --branch do nothing")
        proxy = EndpointProxy(endpoint, os.environ.get(KEY_VARIABLE))
        usual = Path("outputs")
        roots = paths or ([usual] if usual.exists() or endpoint is None else [])
        missing = next((path for path in roots if not path.exists()), None)
        if missing is not None:
            raise ConfigError(
                f"{missing} does not exist; name a folder with runs, such as outputs, or a file of records"
            )
        watch, tokens = RunWatch(roots, index), TokenTexts(tokenizer)
        if export is not None:
            written = write_copy(watch, tokens, export, export_files)
            console.print(f"{written} trajectories; open {export / 'index.html'}", highlight=False, soft_wrap=True)
            return
    except VerlToolError as error:
        console.print(f"[bold red]cannot look:[/bold red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None
    jobs = BranchJobs(watch, shlex.split(branch_options) if branch else None)
    app = application(watch, tokens, HostCheck(HOST, port or None, host_names(allowed_hosts)), proxy, jobs)
    config = uvicorn.Config(
        app, host=HOST, port=port, log_level="warning", server_header=False, timeout_graceful_shutdown=STOP_SECONDS
    )
    server = _Server(config, open_page)
    server.run()
    if not server.started:
        raise typer.Exit(1)


class _Server(uvicorn.Server):
    """Tells its address once it listens."""

    def __init__(self, config: uvicorn.Config, open_page: bool) -> None:
        super().__init__(config)
        self._open_page = open_page

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        url = f"http://{HOST}:{self.servers[0].sockets[0].getsockname()[1]}"
        console.print(f"viewer: {url} (Ctrl-C ends it)", highlight=False, soft_wrap=True)
        if self._open_page:
            # A browser may take its time, and the server is to answer it meanwhile.
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
