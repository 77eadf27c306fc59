"""Container commands for tests: the stand-in, and the machine's own."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

REAL_IMAGE = os.environ.get("VERL_TOOL_TEST_IMAGE", "python:3.12-slim")
_STAND_IN = Path(__file__).with_name("stand_in_docker.py")


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put the stand-in as program ``docker`` first on PATH. Its containers are below `folder`."""
    if shutil.which("bwrap") is None:
        pytest.skip("the stand-in for docker runs commands by bwrap, which is not installed")
    if os.geteuid() != 0:
        pytest.skip("the stand-in for docker needs root, for programs that are another user than their parent")
    program = folder / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {_STAND_IN} "$@"\n')
    program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_STAND_IN", str(folder / "containers"))
    (folder / "containers").mkdir()
    return "docker"


def real(command: str) -> str:
    """Return the machine's ``docker`` or ``podman``. The test is skipped if there is none or the image is missing."""
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    for question, missing in (
        (["version"], f"{command} reaches no daemon"),
        (["image", "inspect", REAL_IMAGE], f"{command} has no image {REAL_IMAGE}; VERL_TOOL_TEST_IMAGE names another"),
    ):
        asked = subprocess.run([command, *question], capture_output=True, timeout=30, check=False)
        if asked.returncode != 0:
            pytest.skip(missing)
    return command
