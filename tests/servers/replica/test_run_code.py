"""``POST /run_code`` over a real sandbox, judged by the rules by which SandboxFusion's clients read it."""

from __future__ import annotations

import base64
from typing import Any

import aiohttp
import pytest
from live_server import LiveServer, LiveServers
from toy_tools import Puppet

from verl_tool.client import ToolClient
from verl_tool.sandbox import Limits, SandboxPool
from verl_tool.sandbox_fusion import RunCodeResponse

pytestmark = pytest.mark.slow


class CodePuppet(Puppet):
    """A puppet with a sandbox."""

    async def start(self) -> None:
        self.sandbox = SandboxPool(workers=1, limits=Limits(wall_seconds=20, memory_bytes=512 << 20), warm_modules=())
        await self.sandbox.__aenter__()

    async def close(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.__aexit__(None, None, None)


async def post(server: LiveServer, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(server.url + "/run_code", json=body) as response:
        return response.status, await response.json()


async def test_the_schema_over_a_real_sandbox(servers: LiveServers) -> None:
    server = await servers.start([CodePuppet()])
    await _success(server)
    await _failure(server)
    await _time_limit(server)
    await _memory_limit(server)
    await _files(server)
    await _refusals(server)
    await _by_client(server)


async def _success(server: LiveServer) -> None:
    status, answer = await post(
        server,
        {
            "compile_timeout": 10,
            "run_timeout": 10,
            "code": "import sys\nprint(input()[::-1])\nprint('note', file=sys.stderr)",
            "stdin": "abc",
            "memory_limit_MB": 1024,
            "language": "python",
            "files": {},
            "fetch_files": [],
        },
    )
    assert status == 200
    assert answer["status"] == "Success", answer
    assert answer["compile_result"] is None
    assert answer["run_result"]["status"] == "Finished"
    assert answer["run_result"]["return_code"] == 0
    assert answer["run_result"]["stdout"] == "cba\n"
    assert answer["run_result"]["stderr"] == "note\n"
    assert answer["run_result"]["execution_time"] > 0


async def _failure(server: LiveServer) -> None:
    _, answer = await post(server, {"code": "print('before')\n1/0"})
    assert answer["status"] == "Failed"
    assert answer["run_result"]["status"] == "Finished"
    assert answer["run_result"]["return_code"] == 1
    assert answer["run_result"]["stdout"] == "before\n"
    assert "ZeroDivisionError" in answer["run_result"]["stderr"]
    _, answer = await post(server, {"code": "import sys; sys.exit(7)"})
    assert (answer["status"], answer["run_result"]["return_code"]) == ("Failed", 7)


async def _time_limit(server: LiveServer) -> None:
    _, answer = await post(server, {"code": "print('x', flush=True)\nwhile True: pass", "run_timeout": 0.5})
    assert answer["status"] == "Failed"
    assert answer["run_result"]["status"] == "TimeLimitExceeded"
    assert answer["run_result"]["return_code"] is None
    assert answer["run_result"]["stdout"] == "x\n"


async def _memory_limit(server: LiveServer) -> None:
    code = "x = bytearray(200 << 20); print(len(x))"
    _, answer = await post(server, {"code": code, "memory_limit_MB": 100})
    assert answer["status"] == "Failed"
    _, answer = await post(server, {"code": code, "memory_limit_MB": -1})
    assert answer["status"] == "Success"
    _, answer = await post(server, {"code": "x = bytearray(800 << 20)", "memory_limit_MB": 4096})
    assert answer["status"] == "Failed", "a request must not raise the sandbox's own limit"


async def _files(server: LiveServer) -> None:
    given = {"data/in.txt": base64.b64encode(b"hello").decode()}
    code = "open('out.bin', 'wb').write(open('data/in.txt', 'rb').read().upper() + b'\\xff')"
    _, answer = await post(server, {"code": code, "files": given, "fetch_files": ["out.bin", "missing"]})
    assert answer["status"] == "Success"
    assert {path: base64.b64decode(content) for path, content in answer["files"].items()} == {"out.bin": b"HELLO\xff"}


async def _refusals(server: LiveServer) -> None:
    status, answer = await post(server, {"code": "int main() {}", "language": "cpp"})
    assert (status, answer["status"]) == (200, "SandboxError")
    assert "'cpp'" in answer["message"]
    for further, field in (
        ({"code": 3}, "code"),
        ({"run_timeout": -1}, "run_timeout"),
        ({"files": {"x": "no base64!"}}, "files"),
        ({"files": {"x": "\u00e9\u00e9\u00e9\u00e9"}}, "files"),
        ({"files": {"../../etc/x": ""}}, "files"),
        ({"files": {"a": "", "a/b": ""}}, "files"),
        ({"files": {f"f{i}": "" for i in range(300)}}, "files"),
        ({"fetch_files": ["a/" * 100 + "b"]}, "fetch_files"),
        ({"fetch_files": ["x" * 300]}, "fetch_files"),
        ({"fetch_files": ["f"] * 300}, "fetch_files"),
        ({"language": "p" * 100}, "language"),
        ({"files": {"main.py/x": ""}}, None),
        ({"run_timeout": 1e-9}, None),
        ({"memory_limit_MB": 1}, None),
    ):
        status, answer = await post(server, {"code": "1", **further})
        assert status == 400, further
        assert answer["error"]["field"] == field
    assert (await post(server, {}))[1]["error"]["field"] == "code"


async def _by_client(server: LiveServer) -> None:
    async with ToolClient(server.url) as client:
        answer = await client.run_code("print(input())", stdin="hi")
    assert isinstance(answer, RunCodeResponse)
    assert answer.run_result is not None
    assert answer.run_result.stdout == "hi\n"


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_other_methods_are_refused(servers: LiveServers, method: str) -> None:
    server = await servers.start([Puppet()])
    async with aiohttp.ClientSession() as session, session.request(method, server.url + "/run_code") as response:
        assert response.status == 405
