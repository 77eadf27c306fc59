"""What programs of a container reach over the proxy of allowed hosts, and what they do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from containers import REAL_IMAGE, real, stand_in

from verl_tool.errors import ConfigError
from verl_tool.sandbox.backends import Container, ContainerSettings
from verl_tool.sandbox.backends.egress import EgressProxy, ProxyRefusedError, _is_public, narrow_hosts
from verl_tool.sandbox.limits import SessionLimits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LIMITS = SessionLimits(wall_seconds=30)
FETCH = """
import sys, urllib.request
for url in sys.argv[1:]:
    try:
        with urllib.request.urlopen(url, timeout=15) as answer:
            print(answer.status, answer.read().decode()[:60])
    except Exception as error:
        print(type(error).__name__, getattr(error, "code", ""), error)
"""
TUNNEL = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", 3128, timeout=15)
connection.set_tunnel("127.0.0.1", int(sys.argv[1]))
for number in range(3):
    connection.request("POST", f"/{number}", body=b"x" * 300_000)
    answer = connection.getresponse()
    print(answer.status, answer.read().decode())
"""


class Server:
    """Answers each request with what it has received."""

    def __init__(self) -> None:
        self.port = 0
        self.heads: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = next(
                    (int(line.split()[1]) for line in head.lower().splitlines() if "content-length" in line), 0
                )
                body = await reader.readexactly(length)
                text = f"{head.split()[1]} {len(body)}".encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
                await writer.drain()
        except asyncio.IncompleteReadError:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    yield server
    listener.close()


@pytest.fixture(params=["stand-in", "podman"])
def settings(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    if request.param == "stand-in":
        return stand_in(tmp_path, monkeypatch), "any"
    return real("podman"), REAL_IMAGE


async def test_allowed_hosts_are_reached_and_others_are_not(settings: tuple[str, str], server: Server) -> None:
    allowed = (f"127.0.0.1:{server.port}", "*.invalid", "localtest.example")
    async with Container(ContainerSettings(*settings, allowed_hosts=allowed), LIMITS) as container:
        urls = [
            f"http://127.0.0.1:{server.port}/a?b=c",
            f"http://127.0.0.1:{server.port + 1}/",
            "http://other.example/",
            "http://name.invalid/",
        ]
        lines = (await container.exec(["python3", "-c", FETCH, *urls], env={"no_proxy": ""})).stdout.splitlines()
        assert lines[0] == "200 /a?b=c 0"
        assert "HTTPError 403" in lines[1]
        assert "HTTPError 403" in lines[2]
        assert "HTTPError 502" in lines[3]
        assert "Proxy" not in server.heads[0]
        assert f"\nHost: 127.0.0.1:{server.port}\r" in server.heads[0]
        tunnel = (await container.exec(["python3", "-c", TUNNEL, str(server.port)])).stdout
        assert tunnel == "".join(f"200 /{number} 300000\n" for number in range(3))
        direct = "import socket; socket.create_connection(('127.0.0.1', int(__import__('sys').argv[1])), 5)"
        refused = await container.exec(["python3", "-c", direct, str(server.port)])
        assert "ConnectionRefusedError" in refused.stderr
        garbage = "printf 'nonsense\\r\\n\\r\\n' > /dev/tcp/127.0.0.1/3128; exec 3<>/dev/tcp/127.0.0.1/3128; echo >&3"
        await container.exec(garbage, wall_seconds=5)
        assert (await container.exec("echo well")).stdout == "well\n"
        many = "import socket\nmany = [socket.create_connection(('127.0.0.1', 3128)) for _ in range(200)]\n"
        await container.exec(["python3", "-c", many + "print(len(many))"], wall_seconds=20)
        assert (await container.exec("echo well")).stdout == "well\n"
        slow = TUNNEL.replace("print(answer", "import time; time.sleep(0.2); print(answer")
        assert (await container.exec(["python3", "-c", slow, str(server.port)])).stdout == tunnel


async def test_there_is_no_proxy_without_allowed_hosts(settings: tuple[str, str]) -> None:
    async with Container(ContainerSettings(*settings), LIMITS) as container:
        result = await container.exec("env | grep -i ^http; exec 3<>/dev/tcp/127.0.0.1/3128")
        assert "refused" in result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize(
    ("hosts", "host", "port", "allowed"),
    [
        (("pypi.org",), "pypi.org", 443, True),
        (("pypi.org",), "PyPI.org", 80, True),
        (("pypi.org",), "pypi.org", 8080, False),
        (("pypi.org:8080",), "pypi.org", 8080, True),
        (("pypi.org:8080",), "pypi.org", 443, False),
        (("pypi.org",), "notpypi.org", 443, False),
        (("pypi.org",), "pypi.org.evil.example", 443, False),
        (("*.pypi.org",), "files.pypi.org", 443, True),
        (("*.pypi.org",), "pypi.org", 443, False),
        (("*",), "anything.example", 443, True),
        (("[::1]:8080",), "::1", 8080, True),
        (("192.0.2.0/24",), "192.0.2.7", 443, True),
        (("192.0.2.0/24",), "192.0.2.7", 8080, False),
        (("192.0.2.0/24",), "192.0.3.7", 443, False),
        (("192.0.2.0/24",), "name.example", 443, False),
        (("2001:db8::/32",), "2001:db8::7", 80, True),
        (("2001:db8::/32",), "192.0.2.7", 80, False),
    ],
)
def test_hosts_are_matched_whole_with_their_port(hosts: tuple[str, ...], host: str, port: int, allowed: bool) -> None:
    assert EgressProxy(hosts)._allows(host, port) is allowed


async def test_a_name_of_an_address_that_is_not_public_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolved(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", ("169.254.169.254", 80)), (2, 1, 6, "", ("10.0.0.1", 80))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    with pytest.raises(ProxyRefusedError, match="no public address"):
        await EgressProxy(["*"])._connected("metadata.example", 80)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("1.1.1.1", True),
        ("10.0.0.1", False),
        ("2606:4700::1111", True),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b::101:101", True),
        ("2002:a00:1::", False),
        ("fe80::1%eth0", False),
    ],
)
def test_addresses_that_stand_for_private_ones_are_not_public(address: str, public: bool) -> None:
    assert _is_public(address) is public


async def test_what_is_no_name_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProxyRefusedError, match="cannot be resolved"):
        await EgressProxy(["*"])._connected("a..example.org", 443)


def test_what_is_no_host_is_rejected() -> None:
    for host in ("http://pypi.org", "a b", "", "pypi.org/simple", "pypi.org:port", "192.0.2.1/24", "::1"):
        with pytest.raises(ConfigError, match="is no host"):
            ContainerSettings("docker", "any", allowed_hosts=(host,))


SERVER = ("example.org", "*.example.org", "10.0.0.1:8080", "[::1]:90")


def test_a_row_only_narrows_the_servers_list() -> None:
    for hosts in ([], ["a.example.org"], ["*.b.example.org"], ["EXAMPLE.org:443"], ["10.0.0.1:8080"], ["[::1]:90"]):
        assert narrow_hosts(SERVER, hosts) == tuple(hosts)
    for host in ("*", "*.org", "example.org:8080", "10.0.0.1", "10.0.0.1:80", "badexample.org", "[::1]"):
        with pytest.raises(ConfigError, match="only narrow"):
            narrow_hosts(SERVER, [host])
    with pytest.raises(ConfigError, match="is no host"):
        narrow_hosts(SERVER, ["a:b:c"])
    with pytest.raises(ConfigError):
        narrow_hosts((), ["example.org"])


def test_no_pattern_stands_for_an_address_that_is_not_public() -> None:
    """Tasks of others bring their hosts: with ``*`` they must not reach the machine of the tool server."""
    for host in ("127.0.0.1", "10.0.0.5:80", "169.254.169.254", "[::1]", "[::ffff:10.0.0.1]"):
        with pytest.raises(ConfigError, match="only narrow"):
            narrow_hosts(["*", "*:8080", "1*", "10.0.0.0/8", "[[]*"], [host])
        assert narrow_hosts([host], [host])
    assert narrow_hosts(["*"], ["1.1.1.1", "pypi.org", "*.org", "[2606:4700::1111]", "1.1.1.0/24"])
    for pattern in ("192.30.*", "1*"):
        with pytest.raises(ConfigError, match="only narrow"):
            narrow_hosts([pattern], ["192.30.0.0/15" if pattern.startswith("192") else "16.0.0.0/4"])
    assert narrow_hosts(["1.0.0.0/8", "2606::/16"], ["1.1.1.1", "1.1.0.0/16", "[2606:4700::1111]"])
    for host in ("8.8.8.8", "0.0.0.0/7", "1.1.1.1:8080", "[2607:4700::1111]", "one.example"):
        with pytest.raises(ConfigError, match="only narrow"):
            narrow_hosts(["1.0.0.0/8", "2606::/16"], [host])


async def test_a_range_has_only_its_public_addresses() -> None:
    with pytest.raises(ProxyRefusedError, match="no public address"):
        await EgressProxy(["127.0.0.0/8"])._connected("127.0.0.1", 80)


@pytest.mark.parametrize("host", ["10.*", "127.1", "2130706433", "0x7f.1"])
async def test_another_way_to_write_an_address_does_not_list_it(
    host: str, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    async def resolved(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", ("127.0.0.1", server.port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    hosts = narrow_hosts(["*"], [host])
    with pytest.raises(ProxyRefusedError, match="no public address"):
        await EgressProxy(hosts)._connected(host.replace("*", "0.0.5"), 80)
