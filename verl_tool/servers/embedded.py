"""``--embedded``: the tool server as one process without Ray, for notebooks and trainings on one machine.

The application, the sandbox and the HTTP server are those of a replica on Ray Serve, so that clients see no difference.
What it lacks is what takes several processes: more replicas, and rolling updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from pathlib import Path

import uvloop

from verl_tool.errors import StartError, VerlToolError
from verl_tool.http.listening_socket import listen_at
from verl_tool.http.supervised_server import write_url_file
from verl_tool.servers.cluster.direct_server import DirectServer
from verl_tool.servers.replica.replica_log import log_to_stderr
from verl_tool.servers.replica.replica_parts import isolation_of, make_app, make_toolset
from verl_tool.servers.replica.router import Router
from verl_tool.servers.serve.ports import reserve_port
from verl_tool.servers.server_console import console, print_start_table
from verl_tool.servers.settings import ReplicaSettings

CLOSE_SECONDS = 2.5
"""Requests that run when the server is told to stop have this long to end."""
CHECK_SECONDS = 5.0
"""How often the server looks whether its tools can still serve."""


def run_embedded(settings: ReplicaSettings, url_file: Path | None = None) -> None:
    """Serve until SIGINT or SIGTERM; a second signal ends it at once.

    `url_file`: the base URL is written into it once the server answers. Raises VerlToolError if the server cannot
    start, or its tools can no longer serve, so that whoever keeps it running starts it again.
    """
    assert settings.listen_port is not None, "an embedded server has a port of its own"
    # What is said to the operator is no record of the log, to which all else that is printed goes.
    console.file = sys.stderr
    log_to_stderr(settings.log_level)
    reservation = reserve_port(settings.listen_port)
    try:
        listener = _listen(settings.listen_host, settings.listen_port)
        # The event loop that replicas on Ray Serve have, too.
        uvloop.run(_serve(settings, listener, url_file))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        reservation.release()
    console.print("stopped")


async def _serve(settings: ReplicaSettings, listener: socket.socket, url_file: Path | None) -> None:
    server, toolset, stop = DirectServer(listener), make_toolset(settings), _Stop()
    try:
        await toolset.start()
        # What is loaded stays: to search it for garbage would hold up the event loop for tens of milliseconds.
        gc.freeze()
        await server.open(make_app(settings, toolset, Router(settings.server)))
        print_start_table(
            settings,
            isolation=isolation_of(toolset),
            runs_on="one process, without Ray (--embedded)",
            url=server.url,
        )
        if url_file is not None:
            write_url_file(url_file, server.url)
        stop.serving = True
        while not await stop.wait(CHECK_SECONDS):
            await toolset.check()
            if not server.is_open():
                raise VerlToolError(f"the HTTP server at {server.url} has ended")
    finally:
        await server.close(CLOSE_SECONDS)
        await toolset.close(CLOSE_SECONDS)


class _Stop:
    """SIGINT and SIGTERM. The first ends the serving, the second one, and one before the server serves, all at once."""

    def __init__(self) -> None:
        self.serving = False
        self._event = asyncio.Event()
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_stop)
        # Unhandled, it would end the process.
        loop.add_signal_handler(signal.SIGUSR1, self._on_update)

    async def wait(self, seconds: float) -> bool:
        """Whether to stop; False after `seconds`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)
        return self._event.is_set()

    def _on_stop(self) -> None:
        if self.serving and not self._event.is_set():
            console.print("stopping; once more Ctrl-C: at once")
            self._event.set()
        elif self._task is not None:
            console.print("[bold]stopping at once[/bold]")
            self._task.cancel()

    def _on_update(self) -> None:
        console.print("an embedded server has one replica, which cannot be replaced: stop it and start it again")


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket of that port and no other. Raises StartError if it cannot be had."""
    try:
        return listen_at(host, port)
    except OSError as error:
        raise StartError(f"{host}:{port} cannot be listened on ({error}); choose another --host or --port") from error
