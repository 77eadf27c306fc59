"""Determine the files of the host that a Python interpreter needs."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import lru_cache

from verl_tool.errors import IsolationError

_ASK = """
import json, os, re, site, sys, sysconfig
own = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
own += site.getsitepackages() + [p for p in sys.path if p.endswith("/dist-packages")]
maps = open("/proc/self/maps").read()
print(json.dumps({
    "executable": sys.executable,
    "real": os.path.realpath(sys.executable),
    "version": sys.version_info[:2],
    "prefix": sys.prefix,
    "path": [p for p in dict.fromkeys(own) if os.path.exists(p)],
    "libraries": sorted(set(re.findall(r"/\\S*libpython\\S*[.]so\\S*", maps))),
}))
"""
_QUESTION_SECONDS = 30.0
_MIN_VERSION, _MAX_VERSION = (3, 10), (3, 12)


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter and the paths that it reads."""

    executable: str
    """The requested path. In a virtual environment, this is a link by which Python finds its packages."""
    real_executable: str
    version: tuple[int, int]
    prefix: str
    paths: tuple[str, ...]
    """Folders of its standard library and installed packages. Folders added by `.pth` files, such as working copies,
    are not included."""
    libraries: tuple[str, ...]
    """Shared libraries of Python itself."""

    def readable_paths(self) -> list[str]:
        """Return all paths that it must read, except for the system's libraries. Parents precede children."""
        venv = os.path.join(self.prefix, "pyvenv.cfg")
        marker = [venv] if os.path.exists(venv) else []
        return sorted({self.real_executable, *self.paths, *self.libraries, *marker})


@lru_cache(maxsize=8)
def inspect(executable: str) -> Interpreter:
    """Query the paths of an interpreter. Raises IsolationError if it does not run, or its version is not supported."""
    try:
        answer = subprocess.run(
            [executable, "-I", "-c", _ASK],
            capture_output=True,
            check=True,
            timeout=_QUESTION_SECONDS,
            stdin=subprocess.DEVNULL,
            env={},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise IsolationError(f"the interpreter {executable!r} does not run: {error}; pass interpreter=") from error
    found = json.loads(answer.stdout)
    version = tuple(found["version"])
    if not _MIN_VERSION <= version <= _MAX_VERSION:
        raise IsolationError(
            f"the interpreter {executable!r} is Python {version[0]}.{version[1]}; the sandbox needs 3.10 to 3.12"
        )
    return Interpreter(
        executable=found["executable"] or executable,
        real_executable=found["real"],
        version=version,
        prefix=found["prefix"],
        paths=tuple(found["path"]),
        libraries=tuple(found["libraries"]),
    )
