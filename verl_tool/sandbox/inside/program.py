"""The user's program: its files, its main module, and its end as Python ends a script."""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import types

from . import wire
from .policy_hooks import PolicyHooks

TYPE_CHECKING = False  # `typing` itself makes every fork dearer
if TYPE_CHECKING:
    from collections.abc import Callable

_FLUSH_FAILED = 120
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class FilesRejectedError(OSError):
    """The files that came with a run cannot be laid out as they are named."""


class SandboxJob:
    """What the pool wants to be run."""

    def __init__(self, code: bytes, files: dict[str, bytes]) -> None:
        self.code = code
        self.files = files


def read_job(fd: int) -> SandboxJob:
    """The job in a job file."""
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
    """Put files into the current directory. Raises FilesRejectedError if two are in each other's way or there is no
    room."""
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
    """An empty `__main__`, as if Python had been started with the script in the current directory."""
    directory = os.getcwd()
    main = types.ModuleType("__main__")
    main.__file__ = f"{directory}/{wire.SCRIPT_NAME}"
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = [wire.SCRIPT_NAME]
    sys.path[0] = directory
    return main


def make_independent() -> None:
    """Make this process, the child of `linux.fork`, one of its own: no two runs may share random numbers, and the main
    thread bears the new process's id."""
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
    """Run the code in `main`, bound to the policy; return the exit code, as far as the code itself decides it."""
    run = exec  # the builtin itself may be restricted next
    status = guarded(lambda: hooks.activate(main))
    return status or guarded(lambda: run(compile(code, wire.SCRIPT_NAME, "exec", dont_inherit=True), main.__dict__))


def finish(main: types.ModuleType, status: int) -> int:
    """Do all that Python does at the end of a script; return the exit code."""
    wait_for_threads = getattr(sys.modules.get("threading"), "_shutdown", None)  # which may be the user's own module
    if wait_for_threads is not None:
        status = guarded(wait_for_threads) or status
    atexit._run_exitfuncs()
    guarded(lambda: forget(main))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or replaced by the user's code
            status = status or _FLUSH_FAILED
    return status


def guarded(step: Callable[[], object]) -> int:
    """The exit code of a step of the user's code; an exception is shown as Python would."""
    try:
        step()
    except SystemExit as error:
        return _exit_code(error.code)
    except BaseException as error:  # noqa: BLE001  (whatever the user's code raises is its own result)
        _report(error)
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
    """Let the main module's objects go, so that their `__del__` runs as at the end of a script."""
    for name in [name for name in main.__dict__ if not name.startswith("__")]:
        main.__dict__[name] = None


def _report(error: BaseException) -> None:
    """Show the error as Python would, without the frames of this package."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        link = queue.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.__traceback__ = _users_part(link.__traceback__)
        queue += [link.__cause__, link.__context__]
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as failure:  # noqa: BLE001  (the user's own hook, or no memory to format a traceback)
        _print_error(f"{type(error).__name__} (and no traceback: {type(failure).__name__})")


def _users_part(traceback: types.TracebackType | None) -> types.TracebackType | None:
    users = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_HERE):
            users.append(traceback)
        traceback = traceback.tb_next
    following = None
    for link in reversed(users):
        link.tb_next = following
        following = link
    return following


def _print_error(text: str) -> None:
    try:
        print(text, file=sys.stderr)
    except (OSError, ValueError, AttributeError):  # stderr was closed or replaced by the user's code
        return
