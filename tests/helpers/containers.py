"""Container commands for tests: the stand-in, and the machine's own."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import machine_image
import pytest

REAL_IMAGE = os.environ.get("VERL_TOOL_TEST_IMAGE", machine_image.NAME)
_ULIMITS = ("--ulimit", "nofile=512:512", "--ulimit", "nproc=1000:1000")
"""Without them, podman asks for more than it may have without CAP_SYS_RESOURCE."""
_STAND_IN = Path(__file__).with_name("stand_in_docker.py")


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put the stand-in as program ``docker`` first on PATH. Its containers are below `folder`."""
    require_bubblewrap()
    program = folder / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {_STAND_IN} "$@"\n')
    program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_STAND_IN", str(folder / "containers"))
    (folder / "containers").mkdir()
    return "docker"


def require_bubblewrap() -> None:
    """Skip the test if there is nothing to run stand-ins with."""
    if shutil.which("bwrap") is None:
        pytest.skip("stand-ins run commands by bwrap, which is not installed")
    if os.geteuid() != 0:
        pytest.skip("stand-ins need root, for programs that are another user than their parent")


@lru_cache
def _missing(command: str) -> str:
    """Why containers do not run here; empty if they do."""
    if shutil.which(command) is None:
        return f"{command} is not installed"
    try:
        if subprocess.run([command, "info"], capture_output=True, timeout=60, check=False).returncode != 0:
            return f"{command} reaches no daemon"
        if REAL_IMAGE == machine_image.NAME:
            machine_image.build(command)
        tried = [command, "run", "--rm", "--network", "none", *_ULIMITS, REAL_IMAGE, "true"]
        subprocess.run(tried, capture_output=True, timeout=120, check=True)
    except subprocess.CalledProcessError as error:
        return f"{command} runs no container of {REAL_IMAGE}: {error.stderr.decode(errors='replace').strip()[-300:]}"
    except subprocess.TimeoutExpired as error:
        return f"{command} is not ready within {error.timeout:g} s"
    return ""


def real(command: str) -> str:
    """Return the machine's ``docker`` or ``podman``. The test is skipped if no container runs here."""
    missing = _missing(command)
    if missing:
        pytest.skip(missing)
    return command
