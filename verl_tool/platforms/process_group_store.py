"""The store of torch's process groups on its own host's address. Written for torch 2.13.

Whoever reaches the store can change what ranks tell each other. Its server listens on all addresses, whatever host it
is given; it has no option for that but to take a socket that listens already.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from packaging.specifiers import SpecifierSet
from torch.distributed import Store, TCPStore

from verl_tool.platforms.patch import Patch

_BACKLOG = 4096


def _on_its_host(original: Callable[..., Store]) -> Callable[..., Store]:
    def _create_c10d_store(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> Store:
        listener = listening(hostname, port) if rank == 0 else None
        if listener is None:
            return original(hostname, port, rank, world_size, timeout, use_libuv)
        return TCPStore(
            host_name=hostname,
            port=listener.getsockname()[1],
            world_size=world_size,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            # The store owns it from now on.
            master_listen_fd=listener.detach(),
            use_libuv=use_libuv,
        )

    return _create_c10d_store


def listening(host: str, port: int) -> socket.socket | None:
    """A socket at this address alone.

    None if there can be none: the name is not this machine's, or a store of this process has the port already.
    """
    with suppress(OSError):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
        else:
            return listener
    return None


STORE = Patch(
    distribution="torch",
    versions=SpecifierSet(">=2.13,<2.14"),
    module="torch.distributed.rendezvous",
    attribute="_create_c10d_store",
    why="the store that ranks meet at listens on all addresses, though they are told one",
    replace=_on_its_host,
)
