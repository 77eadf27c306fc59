"""How replicas of a deployment are reached: at a port of their own, and at the one that all of a node share."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid

import ray
from ray import serve

from verl_tool.errors import StartError
from verl_tool.http.listening_socket import bind_at, listen_at
from verl_tool.http.web_app import WebApp
from verl_tool.servers.cluster.direct_server import DirectServer
from verl_tool.servers.cluster.members import Member
from verl_tool.servers.serve.local_ray import network_address
from verl_tool.servers.serve.ports import PortInUseError, Reservation, share_port

LEAVING_SECONDS = 1.0
"""A replica that takes no new connections any more serves the open ones for so long, so that clients leave them."""
CLAIM_SECONDS, CLAIM_RETRY_SECONDS = 10.0, 0.2
"""How long a replica that starts waits for its server's port, and how often it tries."""
REPLICA_VARIABLES = {
    # Serve would take what a tool prints into its own log, which drops it at the level that it has.
    "RAY_SERVE_LOG_TO_STDERR": "1",
    # What serves HTTP runs in the process's own event loop, and in no second thread.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""Environment of every replica's process."""


def own_listener(*, several_nodes: bool) -> DirectServer:
    """A replica's own server, at a free port; on the node's address if other nodes are to reach it."""
    return DirectServer(listen_at(network_address() if several_nodes else "127.0.0.1", 0))


def make_member(direct: DirectServer) -> Member:
    """What this replica tells the others about itself."""
    return Member(
        # A restarted process is another replica: what the old one held is gone.
        id=f"{serve.get_replica_context().replica_id.unique_id}-{uuid.uuid4().hex[:8]}",
        url=direct.url,
        node=ray.get_runtime_context().get_node_id(),
        started=time.time(),
        key=secrets.token_urlsafe(24),
    )


class SharedPort:
    """The port of the server `server`, at which the replicas of a node listen together."""

    def __init__(self, host: str, port: int, server: str) -> None:
        self._where = host, port, server
        self._share: Reservation | None = None
        self._server: DirectServer | None = None

    async def claim(self) -> None:
        """Bind the port, not yet to serve. Raises StartError if another server still has it after `CLAIM_SECONDS`."""
        host, port, server = self._where
        deadline = time.monotonic() + CLAIM_SECONDS
        while self._share is None:
            try:
                self._share = share_port(port, server)
                self._server = DirectServer(bind_at(host, port, shared=True))
            except (OSError, PortInUseError) as error:
                self._release()
                if time.monotonic() > deadline:
                    raise StartError(f"{host}:{port} cannot be used: {error}; choose another listen_port") from error
                # The replicas of a server that was replaced may still be closing.
                await asyncio.sleep(CLAIM_RETRY_SECONDS)

    async def open(self, app: WebApp) -> None:
        """Begin to serve. Raises as `claim`."""
        await self.claim()
        assert self._server is not None
        self._app = app
        await self._server.open(app)

    def is_open(self) -> bool:
        """Whether it still serves."""
        return self._server is not None and self._server.is_open()

    async def leave(self) -> None:
        """Take no new connection, and have those that are open closed as soon as they are answered."""
        if self._server is not None and self._server.is_open():
            self._app.dismiss_connections()
            await self._server.stop_accepting()
            await asyncio.sleep(LEAVING_SECONDS)

    async def close(self, grace_seconds: float) -> None:
        """End what runs, at most for `grace_seconds`."""
        if self._server is not None:
            await self._server.close(grace_seconds)
        self._release()

    def _release(self) -> None:
        if self._share is not None:
            self._share.release()
            self._share = None
