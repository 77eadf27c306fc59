"""Run the user's program: its files, its main module, and its exit as for a Python script."""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import types

from . import wire
from .policy_hooks import PolicyHooks

TYPE_CHECKING = False  # importing `typing` makes every fork slower
if TYPE_CHECKING:
    from collections.abc import Callable

_FLUSH_FAILED = 120
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class FilesRejectedError(OSError):
    """The files of a run cannot be written under their names."""


class SandboxJob:
    """The code and files that the pool sends."""

    def __init__(self, code: bytes, files: dict[str, bytes]) -> None:
        self.code = code
        self.files = files


def read_job(fd: int) -> SandboxJob:
    """Read a job file."""
    view = memoryview(os.pread(fd, os.fstat(fd).st_size - wire.JOURNAL_BYTES, wire.JOURNAL_BYTES))
    code_size, count = wire.JOB.unpack_from(view)
    at = wire.JOB.size
    code, at = bytes(view[at : at + code_size]), at + code_size
    files = {}
    for _ in range(count):
        name_size, size = wire.FILE.unpack_from(view, at)
        at += wire.FILE.size
        name, at = str(view[at : at + name_size], "utf-8"), at + name_size
        files[name], at = bytes(view[at : at + size]), at + size
    return SandboxJob(code, files)


def write_files(files: dict[str, bytes]) -> None:
    """Write files to the current directory. Raises FilesRejectedError if two of them conflict or the disk is full."""
    for name, content in files.items():
        try:
            _write_file(name, content)
        except OSError as error:
            raise FilesRejectedError(error.errno, error.strerror, name) from error


def _write_file(name: str, content: bytes) -> None:
    folder = os.path.dirname(name)
    if folder:
        os.makedirs(folder, exist_ok=True)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        while content:
            content = content[os.write(fd, content) :]
    finally:
        os.close(fd)


def new_main_module() -> types.ModuleType:
    """Create an empty `__main__`, as if Python had been started with the script in the current directory."""
    directory = os.getcwd()
    main = types.ModuleType("__main__")
    main.__file__ = f"{directory}/{wire.SCRIPT_NAME}"
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = [wire.SCRIPT_NAME]
    sys.path[0] = directory
    return main


def make_independent() -> None:
    """Complete `linux.fork` in the child: reseed random numbers, which runs must not share, and set the native id of
    the main thread."""
    threading = sys.modules.get("threading")
    if threading is not None:
        threading.main_thread()._set_native_id()
    random = sys.modules.get("random")
    if random is not None:
        random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))


def execute(code: bytes, main: types.ModuleType, hooks: PolicyHooks) -> int:
    """Run the code in `main` under the policy. Return its exit code, which `finish` may change."""
    run = exec  # the policy may restrict the builtin
    status = run_guarded(lambda: hooks.activate(main))
    return status or run_guarded(lambda: run(compile(code, wire.SCRIPT_NAME, "exec", dont_inherit=True), main.__dict__))


def finish(main: types.ModuleType, status: int) -> int:
    """Do what Python does at the end of a script, and return the exit code."""
    wait_for_threads = getattr(sys.modules.get("threading"), "_shutdown", None)  # may be a module of the user
    if wait_for_threads is not None:
        status = run_guarded(wait_for_threads) or status
    atexit._run_exitfuncs()
    run_guarded(lambda: forget(main))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or replaced by the user's code
            status = status or _FLUSH_FAILED
    return status


def run_guarded(step: Callable[[], object]) -> int:
    """Run a step of the user's code and return its exit code. An exception is printed as by Python."""
    try:
        step()
    except SystemExit as error:
        return _exit_code(error.code)
    except BaseException as error:  # noqa: BLE001  (any exception is a result of the user's code)
        _print_exception(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    _print_error(str(code))
    return 1


def forget(main: types.ModuleType) -> None:
    """Release the objects of the main module, so that their `__del__` runs as at the end of a script."""
    for name in [name for name in main.__dict__ if not name.startswith("__")]:
        main.__dict__[name] = None


def _print_exception(error: BaseException) -> None:
    """Print the exception as Python would, without the frames of this package."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        link = queue.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.__traceback__ = _strip_internal_frames(link.__traceback__)
        queue += [link.__cause__, link.__context__]
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as failure:  # noqa: BLE001  (the user's own hook, or no memory to format a traceback)
        _print_error(f"{type(error).__name__} (and no traceback: {type(failure).__name__})")


def _strip_internal_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    frames = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_HERE):
            frames.append(traceback)
        traceback = traceback.tb_next
    following = None
    for link in reversed(frames):
        link.tb_next = following
        following = link
    return following


def _print_error(text: str) -> None:
    try:
        print(text, file=sys.stderr)
    except (OSError, ValueError, AttributeError):  # stderr was closed or replaced by the user's code
        return
