"""Check the names by which clients call a server.

A web page may point its own name at 127.0.0.1 (DNS rebinding). Its visitors' browsers then let it call servers on their
machines. Such a request has the page's name as its ``Host``, and the page as its ``Origin``.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope

from verl_tool.http.messages import HeaderMap, HttpError
from verl_tool.util.json_text import excerpt

_REMEMBERED = 64
"""Maximum number of cached ``Host`` values that were accepted."""
_HTTP_PORT = 80


class HostCheck:
    """Rejects requests that were sent to a foreign name.

    The server listens at `host` and `port`. If that is not a loopback address, it may also be called by any IP address
    and by this machine's names, at any port, since pages of other sites do not have these. `allowed` are further names,
    each with a port (``box.example:5000``) or for all ports. With `has_key`, callers need a key, which no page has, so
    that all names are accepted unless the address is a loopback address.
    """

    def __init__(self, host: str, port: int | None, allowed: Sequence[str] = (), *, has_key: bool = False) -> None:
        self._open = not is_loopback(host) and not allowed
        self._active = not (self._open and has_key)
        self._own_names = _own_names(host) if self._open else frozenset()
        self._port = port
        self._allowed = frozenset(name.lower() for name in allowed)
        self._accepted: set[tuple[bytes, int | None]] = set()

    def reject_foreign(self, scope: Scope, headers: HeaderMap) -> None:
        """Raise HttpError 403 for a foreign name, or 400 without ``Host``. `headers` are `headers_of` `scope`."""
        if not self._active:
            return
        host, origin = headers.get(b"host"), headers.get(b"origin")
        server = scope.get("server")
        key = (host or b"", server[1] if server else None)
        if key not in self._accepted:
            self._reject_host(host, server)
            if len(self._accepted) < _REMEMBERED:
                self._accepted.add(key)
        if origin is not None:
            self._reject_origin(origin, host or b"")

    def _reject_host(self, host: bytes | None, server: tuple[str, int | None] | None) -> None:
        if host is None:
            raise HttpError(400, "bad_request", "the header 'host' is missing; HTTP/1.1 asks for it", "host")
        name, port = _name_and_port(host.decode("latin-1"))
        own_address, own_port = server or (None, None)
        # A second port of this server's counts as the first.
        if {name, f"{name}:{port}", f"{name}:{self._port if port == own_port else port}"} & self._allowed:
            return
        if self._open and (name in self._own_names or _is_address(name)):
            return
        right_name = name == "localhost" or is_loopback(name) or name == own_address
        right_port = server is None or self._port is None or port in (self._port, own_port)
        if not (name and right_name and right_port):
            raise _foreign("host", host)

    def _reject_origin(self, origin: bytes, host: bytes) -> None:
        """Raise HttpError 403 unless the page comes from this server or from an allowed name."""
        text = origin.decode("latin-1").lower()
        if text in (f"http://{host.decode('latin-1').lower()}", f"https://{host.decode('latin-1').lower()}"):
            return
        scheme, _, rest = text.partition("://")
        name, port = _name_and_port(rest)
        if scheme not in ("http", "https") or not {name, f"{name}:{port}"} & self._allowed:
            raise _foreign("origin", origin)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`, a name or an address without brackets."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _own_names(host: str) -> frozenset[str]:
    return frozenset(name.lower() for name in (host, socket.gethostname(), socket.getfqdn(), "localhost"))


def _name_and_port(text: str) -> tuple[str, int | None]:
    """Parse ``name``, ``name:port`` or ``[address]:port``. Returns an empty name for anything else."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        return "", None
    if parts.path or parts.query or parts.fragment or parts.username is not None or not parts.hostname:
        return "", None
    return parts.hostname.rstrip("."), _HTTP_PORT if port is None else port


def _foreign(field: str, value: bytes) -> HttpError:
    message = (
        f"{field!r} is {excerpt(value.decode('latin-1'))}, which is not a name of this server; call it by its IP "
        "address (127.0.0.1 on its own machine) and port, or start it with --allowed_hosts NAME"
    )
    return HttpError(403, "forbidden_host", message, field)
