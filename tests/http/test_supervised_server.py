"""A server as a child process: real processes, a small HTTP server in place of the tool server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request

import pytest

from verl_tool.http.supervised_server import SupervisedServer, ToolServerError, serve_command
from verl_tool.servers.serve.ports import free_ports

pytestmark = pytest.mark.slow

SERVER = textwrap.dedent("""
    import http.server, os, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = str(os.getpid()).encode()
            self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
            self.wfile.write(body)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
""")


def supervised(tmp_path, code: str = SERVER, **options) -> SupervisedServer:
    (port,) = free_ports(1)
    return SupervisedServer(
        [sys.executable, "-c", code, str(port)], f"http://127.0.0.1:{port}", tmp_path / "server.log", **options
    )


def pid_that_answers(url: str) -> int | None:
    with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=1) as answer:
        return int(answer.read())
    return None


def wait_for(condition, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def test_it_serves_inside_the_block_only(tmp_path):
    with supervised(tmp_path) as server:
        pid = server.pid
        assert pid_that_answers(server.url) == pid
    assert not is_alive(pid)


def test_a_killed_server_comes_back_at_the_same_place(tmp_path):
    with supervised(tmp_path) as server:
        first = server.pid
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: pid_that_answers(server.url) not in (None, first))
        second = server.pid
    assert not is_alive(second)


def test_a_server_that_keeps_dying_stays_down_in_the_end(tmp_path):
    with supervised(tmp_path, max_restarts=1) as server:
        for _ in range(2):
            wait_for(lambda: pid_that_answers(server.url) == server.pid)
            os.kill(server.pid, signal.SIGKILL)
        time.sleep(1.0)
        assert pid_that_answers(server.url) is None


def test_a_start_that_fails_tells_the_server_s_own_words(tmp_path):
    server = supervised(tmp_path, "import sys; print('no isolation here'); sys.exit(3)")
    with pytest.raises(ToolServerError, match=r"exit code 3(.|\n)*no isolation here"), server:
        pytest.fail("must not start")


def test_a_start_that_takes_too_long(tmp_path):
    server = supervised(tmp_path, "import time; time.sleep(60)", start_timeout=1.0)
    with pytest.raises(ToolServerError, match=r"start_timeout=1\.0"), server:
        pytest.fail("must not start")


def test_a_killed_trainer_leaves_no_server(tmp_path):
    trainer = textwrap.dedent(f"""
        import sys, time
        sys.path[:0] = {sys.path!r}
        from pathlib import Path
        from verl_tool.http.supervised_server import SupervisedServer
        server = SupervisedServer([sys.executable, "-c", {SERVER!r}, sys.argv[1]],
                                  "http://127.0.0.1:" + sys.argv[1], Path({str(tmp_path)!r}) / "log")
        with server:
            print(server.pid, flush=True)
            time.sleep(60)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", trainer, str(free_ports(1)[0])], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert is_alive(pid)
    process.kill()
    process.wait()
    wait_for(lambda: not is_alive(pid))


def test_the_project_s_own_server_is_told_its_tools():
    command = serve_command("calculator,finish", 5001, ["--num_replicas", "2"])
    assert command[1:3] == ["-m", "verl_tool.servers.ray_serve"]
    assert command[3:] == [
        *("--host", "127.0.0.1", "--port", "5001", "--tool_type", "calculator,finish", "--num_replicas", "2"),
    ]


def test_only_a_server_on_a_cluster_has_a_name_there():
    assert serve_command("finish", 5001, app_name="mine")[-2:] == ["--app_name", "mine"]
    assert "--app_name" not in serve_command("finish", 5001, ["--embedded"], app_name="mine")
