"""Building images by a program that stands in for docker, and by podman where it is."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import machine_image
import pytest
from containers import REAL_IMAGE, real

from verl_tool.errors import ConfigError, SandboxError
from verl_tool.sandbox.backends.image_builder import REPOSITORY, ImageBuilder, hash_content

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAM = r"""#!/bin/bash
image="$DOCKER_STAND_IN/${3//[\/:]/_}"
case "$1" in
    image)
        if [ -e "$DOCKER_STAND_IN/broken" ]; then echo "daemon is down" >&2; exit 1; fi
        image="$DOCKER_STAND_IN/${5//[\/:]/_}"
        [ -e "$image" ] || { echo "Error: No such image: $5" >&2; exit 1; } ;;
    build)
        echo "begin $*" >> "$DOCKER_STAND_IN/log"
        cp "$5" "$DOCKER_STAND_IN/Dockerfile"
        echo "step of $5"; sleep "$(cat "${@: -1}/seconds")"
        if [ -e "${@: -1}/message" ]; then cat "${@: -1}/message" >&2; exit 4; fi
        echo end >> "$DOCKER_STAND_IN/log"
        touch "$image" ;;
    pull) echo "no such host" >&2; exit 1 ;;
    *) echo "daemon is down" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program's folder, which has its log."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_STAND_IN", str(tmp_path / "state"))
    return tmp_path / "state"


def make_context(folder: Path, name: str, seconds: float = 0, message: str | None = None) -> Path:
    made = folder.parent / name
    made.mkdir()
    (made / "Dockerfile").write_text(f"FROM python:3.12\nRUN {name}\n")
    (made / "seconds").write_text(str(seconds))
    if message is not None:
        (made / "message").write_text(message)
    return made


def is_running(command: str) -> bool:
    return subprocess.run(["pgrep", "-f", f"^{command}"], check=False, stdout=subprocess.DEVNULL).returncode == 0


async def test_equal_contexts_are_built_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context(folder, "one", 0.2)
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    builder = ImageBuilder("docker", network="host", base_images={"python:*": "local:1"})
    lines: list[str] = []
    images = await asyncio.gather(*(builder.build(context, seconds=20, progress=lines.append) for _ in range(3)))
    images.append(await ImageBuilder("docker", base_images={"python:*": "local:1"}).build(context, seconds=20))
    assert len(set(images)) == len(lines) == 1
    assert (folder / "Dockerfile").read_text() == "FROM local:1\nRUN one\n"
    begin, _ = (folder / "log").read_text().splitlines()
    words = begin.split()
    assert words[1:5] == ["build", "--tag", images[0], "--file"]
    assert images[0].startswith(f"{REPOSITORY}:")
    assert words[6:8] == ["--network", "host"]
    assert "https_proxy=http://proxy:1" in words
    assert words[-1] == str(context)


async def test_a_build_has_no_network_by_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    context = make_context(folder, "one")
    await ImageBuilder("docker").build(context, seconds=20, build_args={"A": "1"})
    begin, _ = (folder / "log").read_text().splitlines()
    assert begin.endswith(f" --network none --build-arg A=1 {context}")


async def test_the_number_of_builds_at_once_is_limited(folder: Path) -> None:
    contexts = [make_context(folder, f"c{number}", 0.3) for number in range(4)]
    builder = ImageBuilder("docker", max_builds=2)
    assert len(set(await asyncio.gather(*(builder.build(context, seconds=20) for context in contexts)))) == 4
    running, highest = 0, 0
    for line in (folder / "log").read_text().splitlines():
        running += -1 if line == "end" else 1
        highest = max(highest, running)
    assert highest == 2


async def test_a_build_that_fails(folder: Path) -> None:
    context = make_context(folder, "one", message="x" * 5000 + "no package cowsay")
    with pytest.raises(ConfigError, match=r"\(exit code 4; the build has no network.*no package cowsay$") as error:
        await ImageBuilder("docker").build(context, seconds=20)
    assert len(str(error.value)) < 4000
    with pytest.raises(ConfigError, match=r"\(exit code 4\): "):
        await ImageBuilder("docker", network="host").build(context, seconds=20)


async def test_a_build_that_takes_too_long_is_ended(folder: Path) -> None:
    context = make_context(folder, "one", 77)
    with pytest.raises(SandboxError, match=r"not built within 0.5 s; .* step of "):
        await ImageBuilder("docker").build(context, seconds=0.5)
    build = asyncio.create_task(ImageBuilder("docker").build(context, seconds=20))
    await asyncio.sleep(0.5)
    build.cancel()
    with pytest.raises(asyncio.CancelledError):
        await build
    assert not is_running("sleep 77")


async def test_an_engine_that_does_not_answer(folder: Path) -> None:
    with pytest.raises(SandboxError, match="docker has no image a:1 and cannot pull it: no such host"):
        await ImageBuilder("docker").describe("a:1")
    (folder / "broken").touch()
    with pytest.raises(SandboxError, match="docker image inspect failed: daemon is down"):
        await ImageBuilder("docker").has("a:1")
    with pytest.raises(ConfigError, match="there is no program 'no-such-engine'"):
        ImageBuilder("no-such-engine")


def test_the_hash_is_of_everything_that_is_built_from(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_text("1")
    hashes = {hash_content("FROM a", tmp_path, {}), hash_content("FROM b", tmp_path, {})}
    hashes.add(hash_content("FROM a", tmp_path, {"A": "1"}))
    os.utime(tmp_path / "sub" / "a", (1, 1))
    assert hash_content("FROM a", tmp_path, {}) in hashes
    (tmp_path / "sub" / "a").chmod(0o755)
    hashes.add(hash_content("FROM a", tmp_path, {}))
    (tmp_path / "sub" / "a").write_text("2")
    hashes.add(hash_content("FROM a", tmp_path, {}))
    (tmp_path / "link").symlink_to("sub")
    hashes.add(hash_content("FROM a", tmp_path, {}))
    assert len(hashes) == 6


async def test_podman(tmp_path: Path) -> None:
    builder = ImageBuilder(real("podman"), base_images={"python:*": REAL_IMAGE})
    (tmp_path / "in.txt").write_text(str(tmp_path))
    (tmp_path / "Dockerfile").write_text("FROM python:3.12\nWORKDIR /srv/app\nCOPY in.txt .\nUSER ada\n")
    image = await builder.build(tmp_path, seconds=60)
    try:
        assert await builder.has(image)
        found = await builder.describe(image)
        assert (found.user, found.workdir) == ("ada", "/srv/app")
        if REAL_IMAGE == machine_image.NAME:
            assert found.loader == (("LD_LIBRARY_PATH", "/usr/local/lib"),), "of the image below it"
        assert await builder.build(tmp_path, seconds=0.001) == image
        with pytest.raises(SandboxError, match="not built within 5 s"):
            await builder.build(tmp_path, f"FROM python:3.12\nRUN sleep 789 # {tmp_path}\n", seconds=5)
        assert not is_running("sleep 789")
    finally:
        await builder.engine.run(["rmi", "--force", image], seconds=60)
