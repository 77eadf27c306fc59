"""The template of a training's processes: started beside the trainer, and gone with it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from verl_tool.platforms.preload.processes import ADDRESS, RAY_JOB
from verl_tool.util.env_variables import variables_unless_set

MODULES = ("verl_tool.platforms.preload.modules",)
STOP_SECONDS = 10.0
"""It has this long to end before it is killed."""
REGISTER_SECONDS = 300
"""A raylet gives its first workers this long in place of a minute: they wait for the template's imports."""


@contextmanager
def template(environment: Mapping[str, str], modules: tuple[str, ...] = MODULES) -> Iterator[None]:
    """Within the block, `processes.Process` and Ray's workers are forked from a process that has loaded `modules`.

    It loads them meanwhile; who asks before it is ready waits. It ends with the block or with this process, and its
    children with it. `environment`: what its imports find beside ours.
    """
    # Only this user may ask: who asks says what is run.
    folder = Path(tempfile.mkdtemp(prefix="verl-tool-", dir="/tmp"))
    alive, local = os.pipe()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "template"))
            listener.listen(64)
            serve = f"from multiprocessing.forkserver import main; main({listener.fileno()}, {alive}, {modules!r})"
            process = subprocess.Popen(
                [sys.executable, "-c", serve],
                stdin=subprocess.DEVNULL,
                pass_fds=(listener.fileno(), alive),
                env={"RAY_AUTH_MODE": "token", **os.environ, **environment, **_ray_flags()},
                # Ctrl-C in the terminal reaches the trainer, which ends the others in order.
                start_new_session=True,
            )
        os.close(alive)
        os.environ[ADDRESS] = str(folder / "template")
        try:
            yield
        finally:
            os.environ.pop(ADDRESS, None)
            os.close(local)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ray_flags() -> dict[str, str]:
    """What a raylet tells a worker by variables, which Ray's core reads when it is imported: before there is a raylet.

    A worker ends when the process with the raylet's id is gone. Ours, which starts the raylet, lives as long.
    """
    return {"RAY_JOB_ID": RAY_JOB, "RAY_RAYLET_PID": str(os.getpid())}


@contextmanager
def forked_ray_workers() -> Iterator[None]:
    """Within the block, a Ray that is started forks its workers from the template, if there is one."""
    if ADDRESS not in os.environ:
        yield
        return
    from ray._private import ray_constants

    # Ray joins this with its own folder, which an absolute path replaces.
    local = str(Path(__file__).with_name("ray_worker.py"))
    # Workers that a raylet starts before there is a job cannot be forked, and none of ours would take them.
    settings = {
        "RAY_worker_register_timeout_seconds": str(REGISTER_SECONDS),
        "RAY_prestart_worker_first_driver": "0",
    }
    with mock.patch.object(ray_constants, "SETUP_WORKER_FILENAME", local), variables_unless_set(settings):
        yield
