"""The container engine of a machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends.engine import ContainerEngine, find_engine
from verl_tool.sandbox.backends.providers.images import image_settings
from verl_tool.sandbox.backends.settings import ImageSettings


@pytest.mark.parametrize(
    ("codes", "found"),
    [
        ({}, "sandbox"),
        ({"docker": 1}, "sandbox"),
        ({"docker": 1, "podman": 0}, "podman"),
        ({"docker": 0, "podman": 1}, "docker"),
        ({"docker": 0, "podman": 0}, "podman"),
    ],
)
def test_an_engine_is_one_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], found: str
) -> None:
    for name, code in codes.items():
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\n[ "$1" = info ] && exit {code}\nexit 9\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))  # none of the machine's own
    find_engine.cache_clear()
    try:
        assert find_engine() == found
    finally:
        find_engine.cache_clear()


def test_a_command_line_that_ends_before_it_is_written_to_is_no_failure(tmp_path: Path) -> None:
    """On the event loop of a replica, which raises RuntimeError where asyncio's own does nothing."""
    uvloop = pytest.importorskip("uvloop")
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\nexec <&-\necho done\n")
    program.chmod(0o755)

    async def run() -> None:
        engine = ContainerEngine("docker")
        start = engine.start

        async def start_late(*arguments: str) -> asyncio.subprocess.Process:
            process = await start(*arguments)
            assert process.stdin is not None
            process.stdin.transport.abort()
            await asyncio.sleep(0.05)
            return process

        engine.start = start_late  # type: ignore[method-assign]
        for stdin in (b"", b"x" * 100_000):
            ran = await engine.run([], seconds=10, stdin=stdin)
            assert (ran.code, ran.stdout) == (0, b"done\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        loop = uvloop.new_event_loop()
        try:
            loop.run_until_complete(run())
        finally:
            loop.close()


@pytest.mark.parametrize("failure", [SandboxError("no", retryable=True), RuntimeError("no")])
async def test_an_image_that_could_not_be_described_is_asked_for_again(failure: Exception) -> None:
    class Provider:
        name = "docker"

        def __init__(self) -> None:
            self.answers = [failure, ImageSettings("0:0", "/")]

        async def describe(self, image: str) -> ImageSettings:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    provider = cast(Any, Provider())
    with pytest.raises(type(failure)):
        await image_settings(provider, "a")
    assert (await image_settings(provider, "a")).workdir == "/"
    assert (await image_settings(provider, "a")).workdir == "/"
