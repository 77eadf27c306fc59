"""The way out of the browser: one HTTP proxy a context, told apart by the address that a connection is for.

Whatever chromium wants (pages, redirects, frames, scripts, WebSockets, service workers) comes through here, and
`EgressProxy` connects to listed hosts only, by the address that it has checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address

from verl_tool.sandbox.backends.egress import EgressProxy

_FIRST = int(IPv4Address("127.16.0.1"))
_COUNT = 1 << 20
_HEAD_BYTES = 1 << 16
_PAUSE_SECONDS = 0.1


class ContextProxy:
    """The proxy of one context. `close` it."""

    def __init__(self, host: str, hosts: Sequence[str], max_bytes: int) -> None:
        """Raises ConfigError for a host that is none."""
        self.host = host
        """Its address on the loopback device."""
        self.port = 0
        self.bytes_left = max_bytes
        """What its pages may still load."""
        self._proxy = EgressProxy(hosts)
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Listen on the loopback device of this process: the browser has no network namespace of its own."""
        self._server = await asyncio.start_server(self.accept, self.host, 0, limit=_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection. Does not wait."""
        self._proxy.accept(_Connection(self, reader, writer))

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        await self._proxy.close()


class _Connection:
    def __init__(self, proxy: ContextProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.stdout = reader
        self.stdin = _BoundedWriter(proxy, writer)


class _BoundedWriter:
    """Ends the connection when its context has loaded all that it may."""

    def __init__(self, proxy: ContextProxy, writer: asyncio.StreamWriter) -> None:
        self._proxy, self._writer = proxy, writer

    def write(self, data: bytes, /) -> None:
        self._proxy.bytes_left -= len(data)
        if self._proxy.bytes_left < 0:
            self._writer.transport.abort()
            raise ConnectionAbortedError("the context has loaded all that it may")
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()


class EgressRouter:
    """The proxies of one browser."""

    def __init__(self, listener: socket.socket | None, port: int) -> None:
        """`listener` listens in the browser's network namespace, on every loopback address, at `port`. Without one,
        each proxy listens here."""
        self._listener, self._port = listener, port
        self._proxies: dict[str, ContextProxy] = {}
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None
        if listener is not None:
            listener.setblocking(False)
            self._task = asyncio.get_running_loop().create_task(self._accept(listener))

    async def open(self, hosts: Sequence[str], max_bytes: int) -> ContextProxy:
        """Make the proxy of a context. `close` it with `remove`."""
        host = str(IPv4Address(_FIRST + next(self._numbers) % _COUNT))
        proxy = ContextProxy(host, hosts, max_bytes)
        if self._listener is None:
            await proxy.listen()
        else:
            proxy.port = self._port
        self._proxies[host] = proxy
        return proxy

    async def remove(self, proxy: ContextProxy) -> None:
        """End a proxy and its connections."""
        self._proxies.pop(proxy.host, None)
        await proxy.close()

    async def close(self) -> None:
        """End all proxies."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for proxy in list(self._proxies.values()):
            await self.remove(proxy)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left, or the connection is over
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            proxy = self._proxies.get(client.getsockname()[0])
            if proxy is None:
                client.close()
                continue
            reader, writer = await asyncio.open_connection(sock=client, limit=_HEAD_BYTES)
            proxy.accept(reader, writer)
