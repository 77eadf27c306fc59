"""What a replica learns from its cluster if Ray Serve's own commands started it, and no launcher of ours."""

from __future__ import annotations

import logging
from hashlib import blake2b

import ray
from ray import serve

from verl_tool.errors import ConfigError
from verl_tool.http.host_check import is_loopback
from verl_tool.servers.settings import ReplicaSettings

logger = logging.getLogger(__name__)

_HEAD = "node:__internal_head__"
"""The resource by which Ray marks the head of a cluster."""


def completed(settings: ReplicaSettings) -> ReplicaSettings:
    """`settings` with the application's name and that of the server. A launcher's are whole already.

    Raises ConfigError if ``several_nodes`` is false on a cluster of several nodes.
    """
    if settings.server:
        return settings
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) > 1 and not settings.several_nodes:
        raise ConfigError(f"several_nodes is false and the Ray cluster has {len(nodes)} nodes; leave it out")
    if not is_loopback(settings.listen_host) and settings.api_key is None:
        logger.warning("open to the network (%s) without an API key; set VERL_TOOL_API_KEY", settings.listen_host)
    app_name = serve.get_replica_context().app_name
    # The same in all replicas, old and new, and another one on each cluster.
    heads = [node["NodeID"] for node in nodes if _HEAD in node["Resources"]]
    mark = blake2b(f"{app_name} {heads}".encode(), digest_size=8).hexdigest()
    found = {"app_name": app_name, "server": f"{app_name}-{mark}"}
    return ReplicaSettings.model_validate(settings.model_dump(include=set(ReplicaSettings.model_fields)) | found)
