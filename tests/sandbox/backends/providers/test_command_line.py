"""Arguments for the command line, parsed by the real programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from verl_tool.sandbox import SessionLimits
from verl_tool.sandbox.backends.image_builder import ImageBuilder
from verl_tool.sandbox.backends.providers import orphans
from verl_tool.sandbox.backends.providers.command_line import commit_arguments, run_arguments
from verl_tool.sandbox.backends.providers.protocol import ContainerSpec
from verl_tool.sandbox.backends.settings import ContainerSettings

pytestmark = [
    pytest.mark.skipif(shutil.which("docker") is None, reason="docker's client is not installed"),
    pytest.mark.slow,
]
REJECTED = ("unknown flag", "unknown shorthand", "invalid argument", "requires", "is not a docker command")


def arguments_of(tmp_path: Path) -> dict[str, list[str]]:
    folders = ("/box/work", "/tmp", "/tests")
    settings = ContainerSettings("docker", "any:1", folders=("/tests",))
    writable = ContainerSettings("docker", "any:1", writable=True, user="0:0", cpus=0.5)
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    builder = ImageBuilder("docker", network="host")
    return {
        "run": run_arguments(ContainerSpec("a", settings, SessionLimits(), folders)),
        "run, writable": run_arguments(ContainerSpec("a", writable, SessionLimits(), folders)),
        "commit": commit_arguments("a", "b:1"),
        "inspect": ["image", "inspect", "--format", "{{.Id}}", "any:1"],
        "pull": ["pull", "--quiet", "any:1"],
        "rm": ["rm", "--force", "a"],
        "rmi": ["rmi", "--force", "a"],
        "list": list(orphans.LIST_CONTAINERS),
        "list images": list(orphans.LIST_IMAGES),
        "build": builder._arguments("b:1", tmp_path / "Dockerfile", tmp_path, {"A": "1"}),
    }


def test_docker_s_own_client_takes_all_arguments(tmp_path: Path) -> None:
    """Without an engine, the client parses its arguments and then finds that nobody listens."""
    environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/nobody.sock", "DOCKER_BUILDKIT": "0"}
    for name, arguments in arguments_of(tmp_path).items():
        done = subprocess.run(
            ["docker", *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode != 0, name
        assert "nobody.sock" in done.stderr, (name, done.stderr)
        assert not any(words in done.stderr.lower() for words in REJECTED), (name, done.stderr)


def test_docker_s_own_client_rejects_what_is_podman_s(tmp_path: Path) -> None:
    environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/nobody.sock"}
    done = subprocess.run(
        ["docker", "commit", "--quiet", "a", "b:1"], env=environment, capture_output=True, text=True, check=False
    )
    assert "unknown flag: --quiet" in done.stderr
