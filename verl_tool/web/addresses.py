"""Allow connections to public addresses only.

A model, or a page that it reads, can name any host. The name is resolved once, the address is checked, and the
connection uses this same address. This protects against names that change their address in between (DNS rebinding).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult

Address = IPv4Address | IPv6Address
_NAT64 = IPv6Network("64:ff9b::/96")


class ForbiddenAddress(OSError):
    """The address of a host is not public."""


def is_public(address: Address) -> bool:
    """Return whether `address` belongs to the public internet.

    False for private networks, this machine, link-local addresses (such as a cloud's metadata service), multicast, and
    IPv6 addresses that embed one of these.
    """
    if isinstance(address, IPv6Address):
        of_it = IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else address.ipv4_mapped
        if of_it is not None:
            return is_public(of_it)
        tunnelled = address.sixtofour or (address.teredo or (None, None))[1]
        if address.is_site_local or (tunnelled is not None and not is_public(tunnelled)):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def anything(address: Address) -> bool:
    """Accept every address. Replaces `is_public` where private addresses are allowed."""
    return True


def check_literal(host: str, allowed: Callable[[Address], bool]) -> None:
    """Check a host that is written as an address. Host names are checked by `CheckedResolver`.

    Raises ForbiddenAddress, also for forms that only some programs accept, such as ``127.1`` and ``2130706433``.
    """
    if ":" not in host and not host.replace(".", "").isdigit():
        return
    try:
        address = ip_address(host)
    except ValueError:
        raise ForbiddenAddress(f"{host} is not written as an address is") from None
    if not allowed(address):
        raise ForbiddenAddress(f"{host} is not a public address")


class CheckedResolver(AbstractResolver):
    """Resolves names with `inner`, and rejects those with an address that is not allowed."""

    def __init__(self, allowed: Callable[[Address], bool] = is_public, inner: AbstractResolver | None = None) -> None:
        self._allowed = allowed
        self._inner = inner or ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Resolve a name. Raises ForbiddenAddress, and OSError if the name does not exist."""
        found = await self._inner.resolve(host, port, family)
        for each in found:
            if not self._allowed(ip_address(each["host"].partition("%")[0])):
                raise ForbiddenAddress(f"{host} does not lead to a public address")
        return found

    async def close(self) -> None:
        await self._inner.close()
