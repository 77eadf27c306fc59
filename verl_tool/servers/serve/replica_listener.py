"""Serve's own gRPC server in a replica, on the address of its node. Written for Ray 2.60.

By it replicas are called through Serve's handles. It unpickles what comes, asks for no token, listens on all addresses,
and has no option.
"""

from __future__ import annotations

from typing import Any

import ray
from ray._common.network_utils import build_address
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica

from verl_tool.errors import VerlToolError

_NAME = "add_port_to_grpc_server"


class ServeChangedError(VerlToolError, ImportError):
    """This version of Ray Serve starts its gRPC server otherwise than the one that this was written for."""


def listen_on_the_node_only() -> None:
    """Call it in a replica's constructor: Serve starts the server once that has returned. Raises ServeChangedError."""
    if _NAME not in vars(replica):
        raise ServeChangedError(
            f"Ray {ray.__version__} has no {replica.__name__}.{_NAME}, by which a replica's gRPC server is kept to "
            "the address of its node; install the version that verl-tool is checked with (scripts/constraints)"
        )
    setattr(replica, _NAME, _on_the_node)


def _on_the_node(server: Any, address: str) -> int:
    """As Ray's function, whatever host `address` names."""
    _, _, port = address.rpartition(":")
    bound: int = add_port_to_grpc_server(server, build_address(ray.util.get_node_ip_address().strip("[]"), port))
    return bound
