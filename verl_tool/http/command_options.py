"""Options of the command line that the tool server, the retrieval server and the endpoint have in common."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer


class LogLevel(str, Enum):
    """Levels of the standard library."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


Host = Annotated[
    str,
    typer.Option(
        "--host", help="Address of the server, on each node that has a replica. 0.0.0.0 opens it to the network."
    ),
]
AllowedHosts = Annotated[
    str,
    typer.Option(
        "--allowed_hosts",
        help="Further names by which clients may call a server on a loopback address, separated by commas, each "
        "with a port or for all ports. Web pages that call it by another name are refused.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray_address",
        envvar="RAY_ADDRESS",
        show_envvar=True,
        help="Ray cluster to join, such as 'auto'. Default: start a local one.",
    ),
]
AppName = Annotated[
    str, typer.Option("--app_name", help="Name of the server on its Ray cluster; each server there has its own.")
]
UrlFile = Annotated[
    Path | None, typer.Option("--url_file", help="File into which the server's base URL is written once it serves.")
]
ReplicasLogLevel = Annotated[LogLevel, typer.Option("--log_level", help="What the replicas log.")]


def api_key_option(variable: str) -> Any:
    """``--api_key``, which may be the environment variable `variable`."""
    words = "Bearer token that every request must bring. Every user of this machine can read a command line (ps): "
    return typer.Option("--api_key", envvar=variable, show_envvar=True, help=f"{words}prefer the variable.")


def host_names(allowed_hosts: str) -> tuple[str, ...]:
    """The names in the value of ``--allowed_hosts``."""
    return tuple(name.strip() for name in allowed_hosts.split(",") if name.strip())
