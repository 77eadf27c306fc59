"""The code of a container on the oldest Python that an image may have."""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
import subprocess
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
    await client.begin({"user": "", "home": str(tmp_path), "env": {}, "seconds": 50})
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
