"""Sockets at which HTTP servers listen, and the URL of a server there."""

from __future__ import annotations

import socket

BACKLOG = 4096
"""Connections that wait to be accepted."""
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of a machine's, and the one at which the machine itself finds a server there."""


def base_url(host: str, port: int) -> str:
    """Base URL of a server at `host`, as seen from this machine."""
    host = _REACHED_AT.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def listen_at(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one. Raises OSError if the port is taken.

    Clients may connect from now on: they wait in the backlog until a server accepts.
    """
    listener = bind_at(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def bind_at(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that is bound and gets no connection yet. `shared`: other processes of this user may be bound there too.

    Raises OSError if the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections of a server that has just ended do not hold the port. Linux still allows one listener only.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
