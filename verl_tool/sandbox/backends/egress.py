"""The way out of a container: an HTTP proxy that connects to the hosts of a list and to nothing else.

Programs find it on their loopback device (``HTTPS_PROXY``). It runs in the server's process, where names are resolved:
the container itself has no network. HTTPS is tunnelled (``CONNECT``, RFC 9110), plain HTTP is passed on request by
request. Nothing is read of what is tunnelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol
from urllib.parse import urlsplit

from verl_tool.errors import ConfigError

PORT = 3128
"""Of the loopback device."""
VARIABLES = {
    name: value
    for proxy, url in (("http_proxy", f"http://127.0.0.1:{PORT}"), ("https_proxy", f"http://127.0.0.1:{PORT}"))
    for name, value in ((proxy, url), (proxy.upper(), url), ("no_proxy", "localhost,127.0.0.1,0.0.0.0,::1"))
}
_PATTERN = re.compile(r"[A-Za-z0-9.*_-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_PORTS = (80, 443)
"""Of a host that is listed without one."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_MAX_HEAD_BYTES = 1 << 14
_CONNECT_SECONDS = 20.0
_HEAD_SECONDS = 30.0
_READ_BYTES = 1 << 16


class ProxyRefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ProxyOutput(Protocol):
    """Where the proxy writes, as an `asyncio.StreamWriter`."""

    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


class ProxyConnection(Protocol):
    """A connection to the proxy, with the names of a program's streams: `stdout` is what the client sends."""

    @property
    def stdin(self) -> ProxyOutput: ...
    @property
    def stdout(self) -> asyncio.StreamReader: ...


class EgressProxy:
    """Serves the connections of one container, or of one browser context. `close` it."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """hosts: names or patterns (``*.example.org``), with a port or for 80 and 443, and ranges of public addresses
        (``192.0.2.0/24``). An address that is not public is reached only if it is listed itself. Raises ConfigError for
        one that is no host."""
        for host in hosts:
            if _network(host) is None and not _PATTERN.fullmatch(host):
                raise ConfigError(
                    f"allowed_hosts: {host!r} is no host; write a name, *.name or an address, with a :port, or a range "
                    "such as 192.0.2.0/24"
                )
        self._hosts = tuple(hosts)
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, connection: ProxyConnection) -> None:
        """Serve a connection. Does not wait."""
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, connection: ProxyConnection) -> None:
        try:
            await self._serve_request(connection)
        except ProxyRefusedError as error:
            body = f"{error}\n".encode()
            head = f"HTTP/1.1 {error.status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            connection.stdin.write(head.encode() + body)
        except (OSError, RuntimeError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            pass  # RuntimeError is uvloop's, of a transport that is closed
        finally:
            connection.stdin.close()

    async def _serve_request(self, connection: ProxyConnection) -> None:
        try:
            reading = connection.stdout.readuntil(b"\r\n\r\n")
            head = await asyncio.wait_for(reading, _HEAD_SECONDS)
        except asyncio.LimitOverrunError:
            raise ProxyRefusedError("431 Request Header Fields Too Large", "the request's head is too long") from None
        line, _, fields = head.partition(b"\r\n")
        words = line.decode("latin-1").split(" ")
        if len(words) != 3 or len(head) > _MAX_HEAD_BYTES:
            raise ProxyRefusedError("400 Bad Request", "this is no request to a proxy")
        method, target, version = words
        if method == "CONNECT":
            host, port = _host_and_port(f"//{target}", 443)
            first = b""
        else:
            host, port = _host_and_port(target, 80)
            first = _passed_on(method, target, version, fields)
        reader, writer = await self._connected(host, port)
        try:
            if method == "CONNECT":
                connection.stdin.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            writer.write(first)
            await asyncio.gather(_pump(connection.stdout, writer), _pump_back(reader, connection))
        finally:
            writer.close()

    async def _connected(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._allows(host, port):
            raise ProxyRefusedError("403 Forbidden", f"{host}:{port} is not among the allowed hosts")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no name"
            raise ProxyRefusedError("502 Bad Gateway", f"{host} cannot be resolved: {reason}") from None
        reason = f"{host} has no public address"
        for address in dict.fromkeys(str(info[4][0]) for info in found):
            if not _is_public(address) and not self._names(address, port):
                continue
            try:
                return await asyncio.wait_for(asyncio.open_connection(address, port), _CONNECT_SECONDS)
            except (OSError, asyncio.TimeoutError) as error:
                reason = f"{host}:{port} cannot be reached: {error or 'it does not answer'}"
        raise ProxyRefusedError("502 Bad Gateway", reason)

    def _allows(self, host: str, port: int) -> bool:
        for pattern in self._hosts:
            name, listed = _split(pattern)
            if fnmatchcase(host.lower(), name.lower()) and (port == listed or (not listed and port in _PORTS)):
                return True
        address, networks = _address(host), map(_network, self._hosts)
        return address is not None and port in _PORTS and any(address in network for network in networks if network)

    def _names(self, address: str, port: int) -> bool:
        """Whether an address is listed itself."""
        return any(_split(pattern) in ((address, 0), (address, port)) for pattern in self._hosts)


def narrow_hosts(allowed: Sequence[str], row: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts of a row, each of which the server's list must cover. Raises ConfigError for another one, and
    for one that is no host."""
    EgressProxy(row)
    for host in row:
        if not any(_covers(pattern, host) for pattern in allowed):
            raise ConfigError(
                f"the row allows the host {host!r:.100}, which the server's allowed_hosts={list(allowed)} does not "
                "cover; a row may only narrow that list"
            )
    return tuple(row)


def _covers(pattern: str, host: str) -> bool:
    name, port = _split_written(pattern)
    other, other_port = _split_written(host)
    if other_port not in ((port,) if port else (0, *_PORTS)):
        return False
    address = _address(other.strip("[]"))
    if address is not None and not _is_public(str(address)):  # it would be listed itself, and so reached
        return other.lower() == name.lower()
    listed, network = _network(pattern), _network(host if address is None else f"{address}/{address.max_prefixlen}")
    if listed is not None and network is not None:
        return listed.version == network.version and network.subnet_of(listed)  # type: ignore[arg-type]
    if "/" in host:
        return name == "*"  # no other pattern of text says what numbers are in a range
    return fnmatchcase(other.lower(), name.lower()) or other.lower() == name.lower()


def _network(text: str) -> Network | None:
    """A range of addresses, such as ``192.0.2.0/24``; None for a host."""
    try:
        return ipaddress.ip_network(text) if "/" in text else None
    except ValueError:
        return None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _split_written(host: str) -> tuple[str, int]:
    """A name or address with its brackets, and its port, 0 without one, or -1 if that is no number."""
    whole = "/" in host or host.endswith("]") or ":" not in host
    name, _, port = (host, "", "0") if whole else host.rpartition(":")
    return name, int(port) if port.isdigit() else -1


def _is_public(address: str) -> bool:
    """Whether an address, and the IPv4 address that an IPv6 address may stand for, is public."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        embedded = found.ipv4_mapped or found.sixtofour
        if embedded is None and found in _NAT64:
            embedded = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if embedded is not None:
            return embedded.is_global
    return found.is_global


def _split(pattern: str) -> tuple[str, int]:
    """A listed host or range, and its port or 0."""
    if "/" in pattern:
        return pattern, 0
    if pattern.startswith("["):
        name, _, port = pattern[1:].partition("]")
        return name, int(port[1:] or 0)
    name, _, port = pattern.partition(":")
    return name, int(port or 0)


def _host_and_port(url: str, default: int) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or default
    except ValueError:
        host, port = None, default
    if not host or parts.scheme not in ("", "http"):
        raise ProxyRefusedError("400 Bad Request", f"{url[:200]!r} is no address that this proxy connects to")
    return host, port


def _passed_on(method: str, target: str, version: str, fields: bytes) -> bytes:
    """A request as its server reads it. One connection is one request."""
    parts = urlsplit(target)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    dropped = (b"proxy-", b"connection:", b"keep-alive:", b"host:")
    lines = [line for line in fields.rstrip(b"\r\n").split(b"\r\n") if not line.lower().startswith(dropped)]
    first = f"{method} {path} {version}".encode("latin-1")
    host = f"Host: {parts.netloc.rpartition('@')[2]}".encode("latin-1")  # the one that was checked
    return b"\r\n".join([first, host, *lines, b"Connection: close", b"", b""])


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_READ_BYTES):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def _pump_back(reader: asyncio.StreamReader, connection: ProxyConnection) -> None:
    while data := await reader.read(_READ_BYTES):
        connection.stdin.write(data)
        await connection.stdin.drain()
    connection.stdin.close()
