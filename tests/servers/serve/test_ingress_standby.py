"""A HAProxy stands in for one that died, and makes room for Serve's own."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_tool.servers.serve import ingress_standby
from verl_tool.servers.serve.ingress import find_ingress_mode, loopback_launcher
from verl_tool.servers.serve.ingress_standby import IngressStandby, stand_in_config
from verl_tool.servers.serve.ports import free_ports

CONFIG = """global
    stats socket {folder}/admin.sock mode 666 level admin
    maxconn 100
defaults
    mode http
    timeout connect 1s
    timeout client 5s
    timeout server 5s
frontend prometheus
    bind 127.0.0.1:{taken}
frontend http_frontend
    bind 127.0.0.1:{port}
    http-request return status 200 content-type text/plain string "stands in"
listen stats
  bind 127.0.0.1:{taken}
  stats enable
"""


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def watch(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[IngressStandby]:
    monkeypatch.setattr(ingress_standby, "HANDOVER_SECONDS", 0.5)
    (tmp_path / "node").mkdir()
    config = CONFIG.format(folder=tmp_path, port=port, taken=free_ports(1)[0])
    (tmp_path / "node" / "haproxy.cfg").write_text(config)
    haproxy = find_ingress_mode().haproxy
    assert haproxy is not None
    watch = IngressStandby(haproxy, tmp_path, "127.0.0.1", port)
    watch.start()
    yield watch
    watch.stop()


def answer(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


def wait_for(port: int, wanted: str) -> None:
    deadline = time.monotonic() + 30
    while answer(port) != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_answers_where_nobody_listens_and_ends_with_its_watch(watch, port):
    wait_for(port, "stands in")
    watch.stop()
    assert answer(port) == "ConnectionRefusedError"


def test_it_makes_room_for_the_one_that_serve_starts(watch, port, tmp_path):
    wait_for(port, "stands in")
    haproxy = find_ingress_mode().haproxy
    assert haproxy is not None
    subprocess.run([loopback_launcher(haproxy, tmp_path, "/"), "-v"], check=True, capture_output=True, timeout=20)
    wait_for(port, "ConnectionRefusedError")
    # Nobody came.
    wait_for(port, "stands in")


def test_it_makes_room_though_the_launcher_found_no_pid(watch, port, tmp_path):
    wait_for(port, "stands in")
    (tmp_path / ingress_standby.PID_FILE).unlink()
    wait_for(port, "ConnectionRefusedError")


def test_one_that_somebody_else_ended_is_replaced_and_leaves_no_pid_behind(watch, port, tmp_path):
    wait_for(port, "stands in")
    pid_file = tmp_path / ingress_standby.PID_FILE
    first = int(pid_file.read_text())
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not pid_file.exists() or pid_file.read_text() in ("", str(first)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    wait_for(port, "stands in")


def test_a_config_that_cannot_be_read_ends_no_watch(watch, port, tmp_path):
    wait_for(port, "stands in")
    config = tmp_path / "node" / "haproxy.cfg"
    config.rename(tmp_path / "node" / "kept")
    config.symlink_to(tmp_path / "node" / "none")
    os.kill(int((tmp_path / ingress_standby.PID_FILE).read_text()), signal.SIGKILL)
    wait_for(port, "ConnectionRefusedError")
    time.sleep(3 * ingress_standby.LOOK_SECONDS)
    config.unlink()
    (tmp_path / "node" / "kept").rename(config)
    wait_for(port, "stands in")


def test_it_leaves_serves_other_ports_alone():
    kept = stand_in_config(CONFIG)
    assert "bind 127.0.0.1:{port}" in kept
    assert not [word for word in ("prometheus", "stats", "{taken}") if word in kept]
