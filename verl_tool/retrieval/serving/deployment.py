"""The Ray Serve application: replicas that each have the index open. Replicas of one machine share its pages."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

from ray import serve
from ray.serve import Application

from verl_tool.retrieval.index import Index
from verl_tool.retrieval.passage import RetrievalError
from verl_tool.retrieval.serving.retrieval_app import RetrievalApp
from verl_tool.retrieval.serving.settings import RetrievalSettings
from verl_tool.servers.cluster.cluster_router import ClusterReports
from verl_tool.servers.cluster.direct_server import guarded
from verl_tool.servers.cluster.members import Members, replica_listing
from verl_tool.servers.cluster.peers import Peers
from verl_tool.servers.replica.replica_log import log_to_stderr
from verl_tool.servers.serve.replica import LEAVING_SECONDS, REPLICA_VARIABLES, SharedPort, make_member, own_listener
from verl_tool.servers.serve.replica_listener import listen_on_the_node_only

DEPLOYMENT = "retrieval"
CLOSE_SECONDS = 10.0
"""What Serve grants a replica to answer what it works on and to close."""


class RetrievalReplica:
    """One replica: the index, the application at the server's port, and a server for the other replicas' questions."""

    async def __init__(self, settings: RetrievalSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        log_to_stderr(settings.log_level)
        listen_on_the_node_only()
        assert settings.listen_port is not None, "a replica shares its server's port"
        self._direct_server = own_listener(several_nodes=settings.several_nodes)
        self._port = SharedPort(settings.listen_host, settings.listen_port, settings.server)
        await self._port.claim()
        self._members = Members(make_member(self._direct_server))
        self._peers = Peers(request_timeout_seconds=settings.request_timeout_seconds, api_key=None)
        self._index = Index(Path(settings.index), settings.embedder)
        self._app = RetrievalApp(
            self._index,
            settings,
            replica=self._members.info.id,
            reports=ClusterReports(self._members, self._peers, direct_open=False, sticky=False),
        )
        # The embedder is called once before anybody waits for it.
        await self._app.searcher.search(["warm"], 1)
        # What is loaded stays: to search it for garbage would hold up the event loop for tens of milliseconds.
        gc.freeze()
        await self._direct_server.open(guarded(self._app.own_reports(), self._members.info.key))
        self._members.start()
        await self._port.open(self._app)

    async def check_health(self) -> None:
        """Raises if this replica can no longer serve; Serve then puts another in its place."""
        self._index.check()
        if not self._direct_server.is_open() or not self._port.is_open():
            raise RetrievalError(f"a server of replica {self._members.info.id} has closed")

    async def describe(self) -> str:
        return self._members.info.id

    async def record_replica_metadata(self) -> dict[str, object]:
        """What Serve tells the other replicas about this one (`Members`)."""
        return self._members.info.model_dump()

    async def __del__(self) -> None:
        """Serve takes this replica away: answer what was begun, then close."""
        await self._port.leave()
        await asyncio.gather(self._port.close(CLOSE_SECONDS / 2), self._direct_server.close(CLOSE_SECONDS / 4))
        await self._app.searcher.close()
        await self._peers.close()


def application(settings: RetrievalSettings, replicas: int, cpus_per_replica: float) -> Application:
    """The Serve application. A replica's libraries use as many threads as it has CPUs: Ray sets OMP_NUM_THREADS."""
    deployment: serve.Deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=replicas,
        ray_actor_options={
            "num_cpus": cpus_per_replica,
            # Threads of faiss that wait for one another would take the cores of what else runs here.
            "runtime_env": {"env_vars": REPLICA_VARIABLES | {"OMP_WAIT_POLICY": "PASSIVE"}},
        },
        request_router_config=replica_listing(),
        graceful_shutdown_timeout_s=LEAVING_SECONDS + CLOSE_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )(RetrievalReplica)
    return deployment.bind(settings)
