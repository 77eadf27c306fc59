"""The Ray Serve application: one deployment, whose replicas are the tool replicas.

A request that reaches a replica is parsed, run in its own sandbox and answered in one process; there is no second
deployment behind it, because a hop through Serve's handles costs milliseconds. Two HTTP servers in each replica share
one app and its admission: Serve's, behind the ingress, and the direct server for peers and for `ToolClient`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import uuid
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve import Application

from verl_tool.errors import VerlToolError
from verl_tool.protocol import ReplicaInfo
from verl_tool.servers.api.asgi_app import ToolServerApp
from verl_tool.servers.api.host_check import is_loopback
from verl_tool.servers.cluster.cluster_router import StatelessRouter
from verl_tool.servers.cluster.direct_server import DirectServer, guarded, listen_at_one_of
from verl_tool.servers.cluster.heartbeat import Heartbeat
from verl_tool.servers.cluster.peers import Peers
from verl_tool.servers.cluster.registry import registry_handle
from verl_tool.servers.cluster.registry_client import RegistryClient, RegistryUnreachableError
from verl_tool.servers.cluster.serve_replicas import ServeReplicas
from verl_tool.servers.cluster.stateful_router import StatefulRouter
from verl_tool.servers.replica_log import log_to_stderr
from verl_tool.servers.replica_parts import isolation_of, make_app, make_toolset
from verl_tool.servers.serve import serve_bypass
from verl_tool.servers.serve.autoscaling import ENTRIES, autoscaling_config
from verl_tool.servers.serve.cluster_settings import completed
from verl_tool.servers.serve.ingress import direct_ports
from verl_tool.servers.serve.local_ray import network_address
from verl_tool.servers.serve.replica_listener import listen_on_the_node_only
from verl_tool.servers.settings import AutoscalingSettings, ReplicaSettings

logger = logging.getLogger(__name__)

DEPLOYMENT = "tools"
"""Name of the application's one deployment."""
CLOSE_SECONDS = 10.0
"""What Serve grants a replica on top of its drain, to close sandboxes and servers."""
DRAIN_LOOK_SECONDS = 0.2
"""How often a draining replica looks whether it is done."""


@dataclass(frozen=True)
class ReplicaDescription:
    """What a replica tells about itself, for the table that the server prints."""

    tools: tuple[str, ...]
    isolation: str
    """Level of isolation in force; empty if no tool runs code."""
    direct_server: str


@serve.ingress()
class ToolReplica:
    """One replica: tools, sandbox, and the two HTTP servers to them."""

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        log_to_stderr(settings.log_level)
        listen_on_the_node_only()
        # Serve has our way past it only where a launcher of ours started it.
        self._bypass = bool(settings.peer_key)
        self._settings = settings = await completed(settings)
        only_here = is_loopback(settings.listen_host)
        several = settings.several_nodes or not only_here
        self._direct_server = DirectServer(
            listen_at_one_of(network_address() if several else "127.0.0.1", direct_ports())
        )
        self._toolset = make_toolset(settings, self._released)
        self._info = self._make_info()
        self._replicas = self._make_replicas()
        self._peers = Peers(
            request_timeout_seconds=settings.request_timeout_seconds,
            api_key=settings.api_key,
            peer_key=settings.peer_key,
            server=settings.server,
        )
        # A direct server on the network is open to those with the API key, or to all if the ingress is.
        self._guarded = several and settings.api_key is None and only_here
        self._app = self._make_app()
        await self._start()

    def __serve_build_asgi_app__(self) -> ToolServerApp:
        """Serve asks for the app behind the ingress."""
        return self._app

    async def check_health(self) -> None:
        """Raises if this replica can no longer serve; Serve then puts another in its place."""
        await self._toolset.check()
        if not self._direct_server.is_open():
            raise VerlToolError(f"the direct server of replica {self._info.id} has closed")

    async def record_replica_metadata(self) -> dict[str, object]:
        """What Serve tells the other replicas about this one (`ServeReplicas`)."""
        return self._info.model_dump()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Entries that run or wait for a place here, by whichever server they came."""
        admission = self._app.admission
        return {ENTRIES: admission.running + sum(admission.waiting(tool.name) for tool in self._toolset.tools)}

    async def describe(self) -> ReplicaDescription:
        """What this replica serves."""
        names = tuple(tool.name for tool in self._toolset.tools)
        return ReplicaDescription(names, isolation_of(self._toolset), self._direct_server.url)

    async def __del__(self) -> None:
        """Serve takes this replica away: stay for the trajectories that live here, then close all."""
        if isinstance(self._replicas, Heartbeat):
            await self._drain(self._replicas)
        await self._replicas.leave()
        await self._direct_server.close(CLOSE_SECONDS / 4)
        await self._toolset.close(CLOSE_SECONDS / 4)
        await self._peers.close()

    async def _start(self) -> None:
        try:
            await self._toolset.start()
            # What is loaded stays: to search it for garbage would hold up the event loop for tens of milliseconds.
            gc.freeze()
            await self._direct_server.open(guarded(self._app, self._settings.peer_key) if self._guarded else self._app)
            await self._replicas.start()
            if self._bypass:
                serve_bypass.offer(self._app, self._settings.app_name, self._settings.route_prefix)
        except BaseException:
            await self._direct_server.close(0.0)
            await self._toolset.close(0.0)
            raise
        logger.info("replica %s serves at %s", self._info.id, self._direct_server.url)

    def _make_info(self) -> ReplicaInfo:
        context = serve.get_replica_context()
        return ReplicaInfo(
            # A restarted process is another replica: what the old one held is gone.
            id=f"{context.replica_id.unique_id}-{uuid.uuid4().hex[:8]}",
            url=self._direct_server.url,
            node=ray.get_runtime_context().get_node_id(),
            started=time.time(),
        )

    def _make_replicas(self) -> Heartbeat | ServeReplicas:
        """Replicas that hold no state join nothing."""
        if not self._toolset.stateful:
            return ServeReplicas(self._info)
        actor = registry_handle(self._settings.app_name, self._settings.state_ttl_seconds)
        return Heartbeat(self._info, RegistryClient(actor), self._toolset.trajectories)

    def _make_router(self) -> StatefulRouter | StatelessRouter:
        direct_open = not self._guarded
        if isinstance(self._replicas, Heartbeat):
            return StatefulRouter(self._replicas, self._peers, direct_open=direct_open)
        return StatelessRouter(self._replicas, self._peers, direct_open=direct_open)

    def _make_app(self) -> ToolServerApp:
        return make_app(self._settings, self._toolset, self._make_router())

    def _released(self, trajectory_id: str, lost: bool) -> None:
        if isinstance(self._replicas, Heartbeat):
            self._replicas.released(trajectory_id, lost)

    async def _drain(self, heartbeat: Heartbeat) -> None:
        """Take nothing new; wait until what lives here has ended, the server stops, or the time is up."""
        try:
            await heartbeat.drain()
        except RegistryUnreachableError as error:
            logger.warning("draining without the registry: %s", error)
        deadline = time.monotonic() + self._settings.drain_seconds
        # Three things may end the wait, none of which is an event.
        while self._toolset.unfinished() and not heartbeat.stopping and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
        left = self._toolset.unfinished()
        if left:
            logger.warning("replica %s ends with %d live trajectories; they are lost", self._info.id, left)


def application(
    settings: ReplicaSettings, replicas: int | AutoscalingSettings, *, cpus_per_replica: float = 1.0
) -> Application:
    """The Serve application, to be given to ``serve.run``. Deployed again, it is a rolling update."""
    deployment: serve.Deployment = serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options={
            "num_cpus": cpus_per_replica,
            # Serve would take what a tool prints into its own log, which drops it at the level set below.
            "runtime_env": {"env_vars": {"RAY_SERVE_LOG_TO_STDERR": "1"}},
        },
        # The app's own admission refuses at its limit, for both servers; Serve's must never come first.
        max_ongoing_requests=2 * (settings.max_concurrent_requests + settings.max_queued_requests),
        # A rolling update starts the new before it takes away the old.
        max_surge_percent=25,
        graceful_shutdown_timeout_s=settings.drain_seconds + CLOSE_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5.0,
        health_check_timeout_s=15.0,
        # At INFO, Serve makes a record for every request and drops it; our own log has its level from the settings.
        logging_config={"enable_access_log": False, "log_level": _serve_log_level(settings.log_level)},
    )(ToolReplica)
    if isinstance(replicas, int):
        deployment = deployment.options(num_replicas=replicas)
    else:
        deployment = deployment.options(autoscaling_config=autoscaling_config(replicas))
    return deployment.bind(settings)


def _serve_log_level(level: str) -> str:
    return "WARNING" if level == "INFO" else level
