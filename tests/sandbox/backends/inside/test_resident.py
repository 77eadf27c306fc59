"""The code of a container on the oldest Python that an image may have."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from verl_tool.sandbox.backends.inside import archive, resident, trusted_paths
from verl_tool.sandbox.backends.providers.runtime import images_runtime
from verl_tool.sandbox.backends.resident_client import ResidentClient

pytestmark = pytest.mark.timeout(60)


def old_python() -> str:
    """A Python 3.8. The test is skipped if there is none."""
    found = [*map(str, Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8")), shutil.which("python3.8")]
    for path in filter(None, found):
        if subprocess.run([path, "--version"], check=False, capture_output=True).returncode == 0:
            return path
    pytest.skip("no Python 3.8 here")


@pytest.mark.parametrize("module", [archive, resident, trusted_paths])
def test_it_needs_no_newer_python_than_3_8(module: ModuleType) -> None:
    ast.parse(Path(str(module.__file__)).read_text(), feature_version=(3, 8))


@pytest.mark.slow
@pytest.mark.parametrize("lines", [False, True])
async def test_programs_and_files_on_python_3_8(tmp_path: Path, lines: bool) -> None:
    (tmp_path / "python3").symlink_to(old_python())
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = await asyncio.create_subprocess_exec(
        *("sh", *images_runtime().command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, limit=1 << 24
    )
    assert process.stdin is not None
    assert process.stdout is not None
    client = ResidentClient(process.stdout, process.stdin, lines)
    # Its own user: no other can be had everywhere.
    await client.begin({"user": "", "home": str(tmp_path), "folder": "", "env": {}, "seconds": 50})
    run = {"env": {}, "cwd": str(tmp_path), "seconds": 20, "bytes": 1000, "python": None}
    header, content = await client.ask("run", b"in", argv=["sh", "-c", "cat; echo err >&2; exit 3"], **run)
    assert (header["status"] >> 8, content) == (3, b"inerr\n")
    await client.ask("write", b"x" * 100_000, path=str(tmp_path / "a" / "b"), make=True)
    assert (await client.ask("read", path=str(tmp_path / "a" / "b"), bytes=1 << 20))[1] == b"x" * 100_000
    shell = await client.spawn(["sh"], {}, str(tmp_path), terminal=True)
    shell.stdin.write(b"echo $((6 * 7)); exit\n")
    assert b"42" in await shell.stdout.read()
    assert await shell.wait() == 0
    await client.close()
    assert await asyncio.wait_for(process.wait(), 10) == 0


def pid_of(become: Callable[[], None], ready: int) -> int:
    """Start a process that is another user."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            become()
            os.write(ready, b"r")
            signal.pause()
        os._exit(1)
    return pid


def may_signal(sender: Callable[[], None], target: int) -> bool:
    """Return whether a process of a user may send a signal to another process."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            sender()
            os.kill(target, 0)
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")
@pytest.mark.parametrize("name", ["65534:65534", "65532:65532", "0:0"])
def test_who_ends_the_processes_of_a_user_is_out_of_their_reach(name: str) -> None:
    user = resident.User(name)

    def begin() -> None:
        """Have the rights of the resident process."""
        if user.uid == 0:
            resident.prctl(resident._PR_SET_KEEPCAPS, 1)
            os.setresuid(*[resident.OWN_USER] * 3)
            resident.set_capabilities(user.own_capabilities)

    def be_program() -> None:
        begin()
        user.become()

    def be_killer() -> None:
        begin()
        user.become_killer()

    ready, theirs = os.pipe()
    started = [pid_of(become, theirs) for become in (begin, be_program, be_killer)]
    try:
        answers = b""
        while len(answers) < len(started):
            answers += os.read(ready, len(started))
        own, program, killer = started
        assert may_signal(be_killer, program)
        assert not may_signal(be_killer, own)
        assert may_signal(be_program, program)
        assert not may_signal(be_program, killer)
        assert not may_signal(be_program, own)
        assert may_signal(begin, killer), "its deadline"
    finally:
        os.close(ready)
        os.close(theirs)
        for pid in started:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
