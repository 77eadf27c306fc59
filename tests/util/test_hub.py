"""Without a hub, its library is told at once."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading

import pytest

from verl_tool.servers.serve.ports import free_ports
from verl_tool.util import hub


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (hub.OFFLINE, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test is over


def test_a_hub_that_nobody_reaches_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv(hub.OFFLINE, "0")
    assert not hub.go_offline_without_hub()
    monkeypatch.setenv(hub.OFFLINE, "")
    assert hub.go_offline_without_hub()
    assert os.environ[hub.OFFLINE] == "1"
    [line] = caplog.messages
    assert f"127.0.0.1:{port} gives no connection" in line
    assert "set HF_HUB_OFFLINE=0 to ask it all the same" in line


def test_an_address_where_packets_get_lost_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as full, socket.socket() as waiting, socket.create_server(("127.0.0.1", 0)) as well:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting.connect(full.getsockname())  # nobody else gets a connection there, nor a refusal
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each.getsockname()) for each in (full, well)]
        monkeypatch.setattr(hub.socket, "getaddrinfo", lambda *_, **__: addresses)
        monkeypatch.setattr(hub, "ADDRESS_SECONDS", 0.3)
        assert not hub.go_offline_without_hub()


def test_a_reachable_hub_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert not hub.go_offline_without_hub()
    finally:
        server.shutdown()
        server.server_close()
    monkeypatch.setenv("HTTP_PROXY", "http://proxy")
    assert not hub.go_offline_without_hub()


@pytest.mark.slow
def test_the_doctor_ends_in_seconds_without_a_hub() -> None:
    pytest.importorskip("transformers")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "verl_tool.doctor", "--model", "some/model"]
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{port}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "some/model" in done.stderr
    assert "the hub cannot be reached" in done.stderr
    assert "Retrying" not in done.stderr
