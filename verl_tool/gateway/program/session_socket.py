"""The gateway for one program: a Unix socket of its own, at which only its session is known.

A program that opens many connections takes none from other programs.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from verl_tool.gateway.gateway_app import SESSIONS_PATH
from verl_tool.http.http_protocol import BoundedHttp
from verl_tool.servers.cluster.direct_server import DirectServer

MAX_CONNECTIONS = 64
_CLOSING_SECONDS = 1.0


class _Http(BoundedHttp):
    """For one program."""

    @classmethod
    def max_connections(cls) -> int:
        """As many as no agent needs."""
        return MAX_CONNECTIONS


@asynccontextmanager
async def listen_for(session_id: str, app: ASGIApp, folder: Path, *, shared: bool = False) -> AsyncIterator[Path]:
    """Serve what `app` has of one session, at the session's path and at ``/``, at a socket in a folder of its own below
    `folder`. shared: other users may connect, as programs in containers are. Raises OSError if that is not possible."""
    own = Path(tempfile.mkdtemp(dir=folder))
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            path = _bind(listener, own, shared)
            server = DirectServer(listener, _Http)
            try:
                await server.open(_only(f"{SESSIONS_PATH}/{session_id}", app))
                yield path
            finally:
                await server.close(_CLOSING_SECONDS)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _only(path: str, app: ASGIApp) -> ASGIApp:
    """`app` below `path`; other paths are taken to be below it."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if not f"{scope['path']}/".startswith(f"{path}/"):
            scope["path"] = path + scope["path"].rstrip("/")
        await app(scope, receive, send)

    return serve


def _bind(listener: socket.socket, folder: Path, shared: bool) -> Path:
    """Give the listener a path that programs can reach, which are other users if we are root."""
    path = folder / "gateway.sock"
    folder.chmod(0o755)
    listener.bind(str(path))
    path.chmod(0o666 if shared or os.geteuid() == 0 else 0o600)
    return path
