"""Which hosts a row may name."""

from __future__ import annotations

import pytest

from verl_tool.browser.egress_router import narrow_hosts
from verl_tool.errors import ConfigError

SERVER = ("example.org", "*.example.org", "10.0.0.1:8080", "[::1]:90")


def test_a_row_only_narrows_the_servers_list() -> None:
    for hosts in ([], ["a.example.org"], ["*.b.example.org"], ["EXAMPLE.org:443"], ["10.0.0.1:8080"], ["[::1]:90"]):
        assert narrow_hosts(SERVER, hosts) == tuple(hosts)
    for host in ("*", "*.org", "example.org:8080", "10.0.0.1", "10.0.0.1:80", "badexample.org", "[::1]", "a:b:c"):
        with pytest.raises(ConfigError, match="only narrow"):
            narrow_hosts(SERVER, [host])
    with pytest.raises(ConfigError):
        narrow_hosts((), ["example.org"])
