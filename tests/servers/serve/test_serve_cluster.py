"""What a `ServeCluster` tells Ray Serve, without a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_tool.errors import ConfigError
from verl_tool.servers.serve import serve_cluster
from verl_tool.servers.serve.ingress import IngressMode
from verl_tool.servers.serve.serve_cluster import PROXY_MARGIN_SECONDS, ServeCluster

PYTHON_PROXY, HAPROXY = IngressMode(None, "none here"), IngressMode(Path("/usr/sbin/haproxy"), "")


def cluster(**options: Any) -> ServeCluster:
    return ServeCluster(**{"host": "127.0.0.1", "port": 5000, "ingress_mode": PYTHON_PROXY, **options})


@pytest.mark.parametrize(
    "value", ["a b", "a\nb", "a\n", "a\r", "a#", 'a"', "a'", "a$HOME", "a\\", "a{b}", "a;b", "\u00e9"]
)
@pytest.mark.parametrize("option", ["host", "app_name", "route_prefix"])
def test_nothing_else_than_a_name_gets_into_haproxys_config(option: str, value: str) -> None:
    value = f"/{value}" if option == "route_prefix" else value
    with pytest.raises(ConfigError, match=f"^--{option} is "):
        cluster(**{option: value})


@pytest.mark.parametrize("prefix", ["a", "/a/", "//a", "/a//b"])
def test_a_prefix_that_is_no_path_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"^--route_prefix is "):
        cluster(route_prefix=prefix)


@pytest.mark.parametrize("host", ["0.0.0.0", "::1", "fe80::1%eth0", "node-1.example"])
@pytest.mark.parametrize("prefix", [None, "/", "/a", "/a-b/c.d_e"])
def test_hosts_and_paths_are_taken(host: str, prefix: str | None) -> None:
    assert cluster(host=host, route_prefix=prefix).host == host


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"ingress_mode": PYTHON_PROXY}, 5.0 + PROXY_MARGIN_SECONDS),
        ({"ingress_mode": HAPROXY}, None),
        ({"ingress_mode": PYTHON_PROXY, "ray_address": "auto"}, None),
    ],
)
def test_the_python_proxy_of_a_local_cluster_does_not_wait_for_ever(
    options: dict[str, Any], seconds: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(serve_cluster.serve, "start", lambda **options: told.update(options))
    started = cluster(**options, request_timeout_seconds=5.0)
    started._start_serve(tmp_path)
    while started._reserved:
        started._reserved.pop().release()
    assert told["http_options"].request_timeout_s == seconds
