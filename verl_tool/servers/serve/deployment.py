"""The Ray Serve application: one deployment, whose replicas are the tool replicas.

A request that reaches a replica is parsed, run in its own sandbox and answered in one process. Ray Serve starts,
places, checks, scales and replaces the replicas, and is not on the way of a request: each replica listens at a port of
its own, for peers and for `ToolClient`, and at the server's port, which the replicas of a node share.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time

from ray import serve
from ray.serve import Application

from verl_tool.errors import StartError, VerlToolError
from verl_tool.http.host_check import is_loopback
from verl_tool.servers.cluster.cluster_router import StatelessRouter
from verl_tool.servers.cluster.direct_server import guarded
from verl_tool.servers.cluster.members import Members, replica_listing
from verl_tool.servers.cluster.peers import Peers
from verl_tool.servers.cluster.stateful_router import StatefulRouter
from verl_tool.servers.replica.replica_log import log_to_stderr
from verl_tool.servers.replica.replica_parts import isolation_of, make_app, make_toolset
from verl_tool.servers.serve.autoscaling import ENTRIES, autoscaling_config
from verl_tool.servers.serve.cluster_settings import completed
from verl_tool.servers.serve.replica import LEAVING_SECONDS, REPLICA_VARIABLES, SharedPort, make_member, own_listener
from verl_tool.servers.serve.replica_listener import listen_on_the_node_only
from verl_tool.servers.settings import AutoscalingSettings, ReplicaSettings

logger = logging.getLogger(__name__)

DEPLOYMENT = "tools"
"""Name of the application's one deployment."""
CLOSE_SECONDS = 10.0
"""What Serve grants a replica on top of its drain, to close sandboxes and servers."""
LISTED_SECONDS = 60.0
"""Deadline for Serve to put a replica that has started on its list of the running ones."""
DRAIN_LOOK_SECONDS = 0.2
"""How often a draining replica looks whether it is done."""


class ToolReplica:
    """One replica: tools, sandbox, and the two HTTP servers to them."""

    _serving: asyncio.Task[None] | None = None

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        log_to_stderr(settings.log_level)
        listen_on_the_node_only()
        self._settings = settings = completed(settings)
        assert settings.listen_port is not None, "a replica shares its server's port"
        only_here = is_loopback(settings.listen_host)
        several = settings.several_nodes or not only_here
        self._direct_server = own_listener(several_nodes=several)
        self._port = SharedPort(settings.listen_host, settings.listen_port, settings.server)
        await self._port.claim()
        self._toolset = make_toolset(settings)
        self._members = Members(make_member(self._direct_server), _shutdown_seconds(settings) + CLOSE_SECONDS)
        self._peers = Peers(
            request_timeout_seconds=settings.request_timeout_seconds, api_key=settings.api_key, server=settings.server
        )
        # A direct server on the network is open to those with the API key, or to all if the server's port is.
        self._guarded = several and settings.api_key is None and only_here
        self._router = self._make_router()
        routes = self._router.routes() if isinstance(self._router, StatefulRouter) else ()
        self._app = make_app(settings, self._toolset, self._router, self._members.info.key, routes)
        self._server_stops = False
        await self._start()

    async def check_health(self) -> None:
        """Raises if this replica can no longer serve; Serve then puts another in its place."""
        await self._toolset.check()
        if not self._direct_server.is_open():
            raise VerlToolError(f"the direct server of replica {self._members.info.id} has closed")
        if self._serving is not None and self._serving.done() and not self._members.draining:
            self._serving.result()
            if not self._port.is_open():
                raise VerlToolError(f"replica {self._members.info.id} does not serve the server's port any more")

    async def record_replica_metadata(self) -> dict[str, object]:
        """What Serve tells the other replicas about this one (`Members`)."""
        return self._members.info.model_dump()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Entries that run or wait for a place here, by whichever server they came."""
        admission = self._app.admission
        return {ENTRIES: admission.running + sum(admission.waiting(tool.name) for tool in self._toolset.tools)}

    async def describe(self) -> str:
        """The isolation in force, for the table that the server prints; empty if no tool runs code."""
        return isolation_of(self._toolset)

    async def stop_without_drain(self) -> None:
        """The whole server is about to stop: trajectories are not waited for."""
        self._server_stops = True

    async def __del__(self) -> None:
        """Serve takes this replica away: stay for the trajectories that live here, then close all."""
        if self._serving is None:
            # It never started, and whatever was open has been closed.
            return
        self._members.leaves = True
        self._serving.cancel()
        if isinstance(self._router, StatefulRouter):
            await self._router.announce_leaving()
        await self._port.leave()
        await self._drain()
        await asyncio.gather(self._port.close(CLOSE_SECONDS / 4), self._direct_server.close(CLOSE_SECONDS / 4))
        await self._toolset.close(CLOSE_SECONDS / 4)
        await self._peers.close()

    async def _start(self) -> None:
        try:
            await self._toolset.start()
            # What is loaded stays: to search it for garbage would hold up the event loop for tens of milliseconds.
            gc.freeze()
            await self._direct_server.open(guarded(self._app, self._members.info.key) if self._guarded else self._app)
            self._members.start()
        except BaseException:
            await self._direct_server.close(0.0)
            await self._toolset.close(0.0)
            await self._port.close(0.0)
            raise
        self._serving = asyncio.create_task(self._serve_port())
        logger.info("replica %s serves at %s", self._members.info.id, self._direct_server.url)

    async def _serve_port(self) -> None:
        """Take clients once the other replicas are known, and they know of this one. Raises StartError."""
        try:
            await asyncio.wait_for(self._members.listed.wait(), LISTED_SECONDS)
        except asyncio.TimeoutError:
            raise StartError(
                f"Ray Serve has not listed replica {self._members.info.id} in {LISTED_SECONDS:g} s; it starts another"
            ) from None
        await self._port.open(self._app)

    def _make_router(self) -> StatefulRouter | StatelessRouter:
        """Replicas that hold no state need not ask each other what they hold."""
        direct_open = not self._guarded
        if self._toolset.stateful:
            return StatefulRouter(self._members, self._peers, self._toolset.knows, direct_open=direct_open)
        return StatelessRouter(self._members, self._peers, direct_open=direct_open)

    def _is_busy(self) -> bool:
        live = self._toolset.unfinished() if isinstance(self._router, StatefulRouter) else 0
        return bool(live or self._app.admission.inside)

    async def _drain(self) -> None:
        """Take nothing new; wait until what lives and runs here has ended, the server stops, or the time is up."""
        deadline = time.monotonic() + self._settings.drain_seconds
        while self._is_busy() and not self._server_stops and time.monotonic() < deadline:
            if isinstance(self._router, StatefulRouter):
                await self._router.announce_leaving()
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
        left = self._toolset.unfinished()
        if left:
            logger.warning("replica %s ends with %d live trajectories; they are lost", self._members.info.id, left)


def application(
    settings: ReplicaSettings, replicas: int | AutoscalingSettings, *, cpus_per_replica: float = 1.0
) -> Application:
    """The Serve application, to be given to ``serve.run``. Deployed again, it is a rolling update."""
    deployment: serve.Deployment = serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": cpus_per_replica, "runtime_env": {"env_vars": REPLICA_VARIABLES}},
        request_router_config=replica_listing(),
        # A rolling update starts the new before it takes away the old.
        max_surge_percent=25,
        graceful_shutdown_timeout_s=_shutdown_seconds(settings),
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5.0,
        health_check_timeout_s=15.0,
        # At INFO, Serve makes a record for every request and drops it. Our own log has its level from the settings.
        logging_config={
            "enable_access_log": False,
            "log_level": "WARNING" if settings.log_level == "INFO" else settings.log_level,
        },
    )(ToolReplica)
    if isinstance(replicas, int):
        deployment = deployment.options(num_replicas=replicas)
    else:
        deployment = deployment.options(autoscaling_config=autoscaling_config(replicas))
    return deployment.bind(settings)


def _shutdown_seconds(settings: ReplicaSettings) -> float:
    """What Serve grants a replica from when it is taken off the list until its process is ended."""
    return settings.drain_seconds + LEAVING_SECONDS + CLOSE_SECONDS
