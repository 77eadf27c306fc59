"""What a replica learns from its cluster if Ray Serve's own commands started it, and no launcher of ours."""

from __future__ import annotations

import logging
from hashlib import blake2b

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from verl_tool.errors import ConfigError
from verl_tool.servers.api.host_check import is_loopback
from verl_tool.servers.settings import ReplicaSettings, new_peer_key

logger = logging.getLogger(__name__)


async def completed(settings: ReplicaSettings) -> ReplicaSettings:
    """`settings` with the application's name and keys, and the address of the ingress. A launcher's are whole already.

    Raises ConfigError if ``several_nodes`` is false on a cluster of several nodes.
    """
    if settings.peer_key:
        return settings
    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes > 1 and not settings.several_nodes:
        raise ConfigError(f"several_nodes is false and the Ray cluster has {nodes} nodes; leave it out")
    app_name = serve.get_replica_context().app_name
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    http = await controller.get_http_config.remote()
    peer_key = _shared_key(app_name)
    if not is_loopback(http.host) and settings.api_key is None:
        logger.warning("open to the network (%s) without an API key; set VERL_TOOL_API_KEY", http.host)
    found = {
        "app_name": app_name,
        # Of the key, so that it is the same in all replicas, old and new.
        "server": f"{app_name}-{blake2b(peer_key.encode(), digest_size=8).hexdigest()}",
        "peer_key": peer_key,
        "listen_host": http.host,
        "listen_port": http.port,
    }
    return ReplicaSettings.model_validate(settings.model_dump(include=set(ReplicaSettings.model_fields)) | found)


def _shared_key(app_name: str) -> str:
    """The key of an application's replicas, made by the first that asks. Who runs code on the cluster may see it."""
    name = f"verl_tool:peer_key:{app_name}"
    _internal_kv_put(name, new_peer_key(), overwrite=False)
    return _internal_kv_get(name).decode()
