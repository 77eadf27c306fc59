"""How a process is forked from the template. Imports the standard library only: it runs where a millisecond counts.

The template is the standard library's fork server; what it lacks is the environment of whoever asks.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import random
import runpy
import signal
import sys
from multiprocessing import (
    context,
    forkserver,
    popen_fork,
    popen_forkserver,
    popen_spawn_posix,
    process,
    resource_tracker,
)
from typing import Any
from unittest import mock

ADDRESS = "VERL_TOOL_TEMPLATE"
"""The environment variable with the template's socket; without it there is none."""
RAY_JOB = "01000000"
"""The first job of a cluster, and the only one whose workers are forked: Ray's core learns it when it is imported."""
_PR_SET_PDEATHSIG = 1


class _Template(forkserver.ForkServer):
    """The one whose socket the environment names, which another process started."""

    def __init__(self) -> None:
        super().__init__()
        self._forkserver_address = os.environ[ADDRESS]
        # It ends with the process that started it, whoever else lives.
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDWR)

    def ensure_running(self) -> None:
        """Its starter sees to that."""


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: process.BaseProcess) -> None:
        # Other processes of this one are started by Python's own server.
        with mock.patch.object(forkserver, "connect_to_new_process", _Template().connect_to_new_process):
            super()._launch(process_obj)  # type: ignore[misc]


class Process(process.BaseProcess):
    """As `multiprocessing.Process`; forked from the template, in the environment of its starter."""

    _start_method = "forkserver"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment: dict[str, str] = {}

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> popen_fork.Popen:
        return _Popen(process_obj)

    def start(self) -> None:
        """Start it. Raises OSError if the template does not answer."""
        self._environment = dict(os.environ)
        super().start()

    def _bootstrap(self, *args: Any) -> int:
        _begin(self._environment)
        return super()._bootstrap(*args)  # type: ignore[misc]


class Script(Process):
    """A forked ``python ARGUMENTS``, as if nobody had forked it."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(name="MainProcess")
        self._arguments = arguments

    def _bootstrap(self, *_: Any) -> int:
        _begin(self._environment)
        # A raylet ends a worker with its group.
        os.setpgid(0, 0)
        # It makes one of its own when it comes to need one.
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
        sys.argv = self._arguments
        sys.path[0] = os.path.dirname(self._arguments[0])
        try:
            runpy.run_path(self._arguments[0], run_name="__main__")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            atexit._run_exitfuncs()
        return 0


class ForkedOrSpawned(Process):
    """A `Process` that starts anew, as multiprocessing's own, where the template does not answer."""

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> popen_fork.Popen:
        try:
            return _Popen(process_obj)
        except (OSError, EOFError):
            return popen_spawn_posix.Popen(process_obj)


class ProcessContext(context.ForkServerContext):
    """What `multiprocessing.get_context` gives, with processes of ours."""

    Process = ForkedOrSpawned  # type: ignore[assignment]


class Contexts:
    """The module `multiprocessing` for a caller who asks it for a context."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)

    def get_context(self, method: str | None = None) -> context.BaseContext:
        """The template's where there is one, whatever the method."""
        return ProcessContext() if ADDRESS in os.environ else multiprocessing.get_context(method)


def _begin(environment: dict[str, str]) -> None:
    # Who leaves the template behind has nobody who ends it. Linux only.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    # Forked ones would draw the same numbers.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    threads = environment.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdigit():
        sys.modules["torch"].set_num_threads(int(threads))
