"""Which files of the host a Python interpreter needs."""

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
_OLDEST, _NEWEST = (3, 10), (3, 12)


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter and the places that it reads."""

    executable: str
    """As asked for; within a virtual environment this is a link that tells Python where its packages are."""
    real_executable: str
    version: tuple[int, int]
    prefix: str
    paths: tuple[str, ...]
    """The folders of its standard library and installed packages. Not what else `.pth` files put on its path: that is
    somebody's working copy."""
    libraries: tuple[str, ...]
    """Its own shared libraries."""

    def readable_paths(self) -> list[str]:
        """All that it must be able to read, besides the system's own libraries; parents before children."""
        venv = os.path.join(self.prefix, "pyvenv.cfg")
        marker = [venv] if os.path.exists(venv) else []
        return sorted({self.real_executable, *self.paths, *self.libraries, *marker})


@lru_cache(maxsize=8)
def inspect(executable: str) -> Interpreter:
    """Ask an interpreter about itself. Raises IsolationError if it does not run here, or is of another version."""
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
    if not _OLDEST <= version <= _NEWEST:
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
