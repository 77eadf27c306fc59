"""Which addresses of the internet may be connected to: public ones, as they were looked up and not as a name says.

A model, or a page that it reads, names any host. What such a host leads to is looked up once, checked, and that very
address is connected to, so that a name which changes its address in between (DNS rebinding) gains nothing.
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
    """A host that leads to an address which is not public."""


def is_public(address: Address) -> bool:
    """Whether `address` is one of the public internet's: none of a private network, this machine, a link, a cloud's
    metadata service, a group, nor one in which such an address is embedded."""
    if isinstance(address, IPv6Address):
        of_it = IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else address.ipv4_mapped
        if of_it is not None:
            return is_public(of_it)
        tunnelled = address.sixtofour or (address.teredo or (None, None))[1]
        if address.is_site_local or (tunnelled is not None and not is_public(tunnelled)):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def anything(address: Address) -> bool:
    """In place of `is_public`, where private addresses are meant to be read."""
    return True


def check_literal(host: str, allowed: Callable[[Address], bool]) -> None:
    """Refuse a host that is written as an address and may not be connected to. Names are for `CheckedResolver`. Raises
    ForbiddenAddress, also for what only some programs take for an address, such as ``127.1`` and ``2130706433``."""
    if ":" not in host and not host.replace(".", "").isdigit():
        return
    try:
        address = ip_address(host)
    except ValueError:
        raise ForbiddenAddress(f"{host} is not written as an address is") from None
    if not allowed(address):
        raise ForbiddenAddress(f"{host} is not a public address")


class CheckedResolver(AbstractResolver):
    """Looks names up, and refuses those of which an address is not allowed. `inner`: what looks up."""

    def __init__(self, allowed: Callable[[Address], bool] = is_public, inner: AbstractResolver | None = None) -> None:
        self._allowed = allowed
        self._inner = inner or ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises ForbiddenAddress, and OSError if there is no such name."""
        found = await self._inner.resolve(host, port, family)
        for each in found:
            if not self._allowed(ip_address(each["host"].partition("%")[0])):
                raise ForbiddenAddress(f"{host} does not lead to a public address")
        return found

    async def close(self) -> None:
        await self._inner.close()
