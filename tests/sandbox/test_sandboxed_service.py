"""Programs that go on running, confined as runs are."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from venv import EnvBuilder

import psutil
import pytest

from verl_tool.errors import ConfigError
from verl_tool.sandbox.isolation import seccomp
from verl_tool.sandbox.limits import Limits
from verl_tool.sandbox.sandboxed_service import RunningService, SandboxedService, ServiceSandbox

pytestmark = pytest.mark.slow

ECHO = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"
LOOK = """
import grp, json, os, pwd, socket, subprocess, sys
def attempt(work):
    try:
        return work()
    except Exception as error:
        return type(error).__name__
print(json.dumps({
    "env": dict(os.environ), "cwd": os.getcwd(), "uid": os.getuid(),
    "pids": [p for p in os.listdir("/proc") if p.isdigit()],
    "secret": attempt(lambda: open(sys.argv[2]).read()), "etc": sorted(os.listdir("/etc")),
    "user": attempt(lambda: [pwd.getpwuid(os.getuid())[0], pwd.getpwuid(os.getuid())[5], grp.getgrgid(os.getgid())[0]]),
    "users": [len(pwd.getpwall()), len(grp.getgrall())],
    "chmod": attempt(lambda: os.chmod("/etc/passwd", 0o666)),
    "socket": attempt(lambda: socket.socket() and "made"), "fds": len(os.listdir("/proc/self/fd")),
    "write": attempt(lambda: open("/usr/x", "w") and "written"), "own": attempt(lambda: open("x", "w") and "written"),
    "read": attempt(lambda: open(sys.argv[1]).read()),
    "child": attempt(lambda: subprocess.run(["true"]).returncode),
    "setuid": attempt(lambda: os.setuid(0)), "memory": attempt(lambda: len(bytearray(600 << 20))),
    "mount": attempt(lambda: subprocess.run(["mount", "-t", "tmpfs", "x", "/box"], stderr=-3).returncode),
}), flush=True)
"""


@pytest.fixture(params=["own user", "user namespace"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[ServiceSandbox]:
    made = ServiceSandbox(Limits(memory_bytes=512 << 20, processes=16))
    await made.start()
    if request.param == "user namespace":
        assert made._isolation is not None
        strict = seccomp.compile_filter()
        made._isolation = replace(made._isolation, as_root=False, run_filter=strict, server_filter=b"")
    yield made
    await made.close()


async def line(running: RunningService) -> str:
    assert running.process.stdout is not None
    return (await asyncio.wait_for(running.process.stdout.readline(), 20)).decode()


async def test_it_answers_again_and_again_until_it_is_ended(sandbox: ServiceSandbox) -> None:
    running = await sandbox.spawn(SandboxedService(("python", "-c", ECHO)))
    family = [psutil.Process(running.process.pid)]
    assert running.process.stdin is not None
    for word in ("abc", "xyz"):
        running.process.stdin.write(f"{word}\n".encode())
        assert await line(running) == f"{word[::-1]}\n"
    family += family[0].children(recursive=True)
    assert len(family) >= 3
    await running.end()
    assert psutil.wait_procs(family, timeout=5)[1] == []


async def test_what_it_sees_and_may_do(
    sandbox: ServiceSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_TOOL_API_KEY", "a secret")
    (tmp_path / "given.txt").write_text("given")
    os.chmod(tmp_path, 0o755)
    given, secret = str(tmp_path / "given.txt"), str(tmp_path.parent / "secret.txt")
    os.close(os.open(secret, os.O_CREAT | os.O_WRONLY, 0o644))
    command = ("python", "-c", LOOK, given, secret)
    running = await sandbox.spawn(SandboxedService(command, {"GIVEN": "1"}, readable=(str(tmp_path),)))
    lines = [json.loads(text) for text in [await line(running), await line(running)] if text.startswith("{")]
    seen = lines[0]
    await running.end()
    assert set(seen["env"]) <= {"PATH", "HOME", "LANG", "GIVEN", "PYTHONDONTWRITEBYTECODE", "PWD", "LC_CTYPE"}
    assert (seen["cwd"], seen["own"], seen["read"], seen["child"]) == ("/box/work", "written", "given", 0)
    assert seen["uid"] != 0 or os.getuid() != 0
    assert len(seen["pids"]) <= 3
    assert seen["secret"] == "FileNotFoundError"
    assert set(seen["etc"]) <= {"alternatives", "group", "ld.so.cache", "localtime", "passwd"}
    assert (seen["user"], seen["users"]) == (["sandbox", "/box/work", "sandbox"], [1, 1])
    assert seen["chmod"] in ("PermissionError", "OSError")
    assert seen["socket"] == "PermissionError"
    assert seen["write"] in ("PermissionError", "OSError")
    assert seen["setuid"] == "PermissionError"
    assert seen["memory"] == "MemoryError"
    assert seen["mount"] != 0
    assert seen["fds"] <= 4


async def test_beside_the_sandbox_it_finds_no_secret_either(
    sandbox: ServiceSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_TOOL_API_KEY", "a secret")
    look = "import json, os; print(json.dumps([sorted(os.environ), os.getuid()]))"
    running = await sandbox.spawn(SandboxedService(("python", "-c", look), {"GIVEN": "1"}, sandboxed=False))
    names, uid = json.loads(await line(running))
    await running.end(grace_seconds=1.0)
    assert uid == os.getuid()
    assert "GIVEN" in names
    assert set(names) <= {"GIVEN", "HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG", "LC_CTYPE", "PWD"}


async def test_what_cannot_be_started_is_named(sandbox: ServiceSandbox, tmp_path: Path) -> None:
    for sandboxed in (True, False):
        with pytest.raises(ConfigError, match="program 'no-such-program' was not found"):
            await sandbox.spawn(SandboxedService(("no-such-program",), sandboxed=sandboxed))
    with pytest.raises(ConfigError, match="all of this machine"):
        await sandbox.spawn(SandboxedService(("python",), readable=("/usr/..",)))
    with pytest.raises(ConfigError, match="nowhere"):
        await sandbox.spawn(SandboxedService(("python",), readable=(str(tmp_path / "nowhere"),)))
    running = await sandbox.spawn(SandboxedService(("python", "-c", ""), cwd="/nowhere"))
    assert running.process.stderr is not None
    assert b"cannot be started in the sandbox" in await running.process.stderr.read()
    await running.end()


async def test_an_environment_below_tmp_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        environment = f"{folder}/a clone/.venv"
        await asyncio.to_thread(EnvBuilder(symlinks=True).create, environment)
        program = Path(environment) / "bin" / "program"
        program.write_text("#!/usr/bin/env python\nimport sys\nprint(sys.prefix, flush=True)\nsys.stdin.read()\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", f"{environment}/bin/python")
        sandbox = ServiceSandbox()
        for command in (("python", "-c", "import sys; print(sys.prefix, flush=True); sys.stdin.read()"), ("program",)):
            running = await sandbox.spawn(SandboxedService(command))
            assert (await line(running)).strip().endswith("/a clone/.venv")
            await running.end()
        await sandbox.close()
