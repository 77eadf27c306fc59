"""Which addresses are public."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from verl_tool.web.addresses import CheckedResolver, ForbiddenAddress, anything, check_literal, is_public


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1", "fc00::1"),
        *("fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
        *("2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001:0:1:2::80ff:fffe"),
    ],
)
def test_those_that_are_not(address: str) -> None:
    assert not is_public(ip_address(address))
    with pytest.raises(ForbiddenAddress):
        check_literal(address, is_public)
    check_literal(address, anything)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101"])
def test_those_that_are(address: str) -> None:
    assert is_public(ip_address(address))
    check_literal(address, is_public)


@pytest.mark.parametrize("host", ["2130706433", "127.1", "0", "0177.0.0.1", "1.2.3.4.5", "fe80::1%lo:"])
def test_what_only_some_take_for_an_address_is_refused(host: str) -> None:
    with pytest.raises(ForbiddenAddress):
        check_literal(host, is_public)


class Names(AbstractResolver):
    """Answers with these addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list:
        kind = {4: socket.AF_INET, 6: socket.AF_INET6}
        return [
            ResolveResult(hostname=host, host=each, port=port, family=kind[ip_address(each).version], proto=0, flags=0)
            for each in self.addresses
        ]

    async def close(self) -> None:
        pass


async def test_a_name_is_refused_if_one_of_its_addresses_is_not_public() -> None:
    found = await CheckedResolver(inner=Names("1.1.1.1", "2606:4700::1111")).resolve("a.example", 80)
    assert [each["host"] for each in found] == ["1.1.1.1", "2606:4700::1111"]
    for private in ("127.0.0.1", "::1", "fe80::1%eth0".partition("%")[0]):
        with pytest.raises(ForbiddenAddress, match=r"a\.example does not lead to a public address"):
            await CheckedResolver(inner=Names("1.1.1.1", private)).resolve("a.example", 80)


async def test_names_of_this_machine_are_looked_up_for_real() -> None:
    for host in ("localhost", "0x7f000001"):
        with pytest.raises(ForbiddenAddress):
            await CheckedResolver().resolve(host, 80, socket.AF_UNSPEC)
