"""Run programs in the forkserver itself, so that its forks start with warm caches.

A fork shares its parent's memory until it writes to it; the first write to each page causes a fault and a copy. Python
writes a lot when it does something for the first time: it imports lazily, specialises bytecode, and fills the cache of
type attributes, where each new entry also releases an old name. Doing it here once spares the runs this work.
"""

from __future__ import annotations

import io
import os
import sys

from . import program, streams, wire
from .policy_hooks import PolicyHooks

_TIMES = 20
"""Number of passes. Python specialises bytecode after a few."""
_PROGRAMS = (
    b"print(1 + 1)\n",
    b"import math\ndef f(x):\n    return math.sqrt(x)\nfor i in range(3):\n    print(f'{f(i):.3f}', i, [i], {i: i})\n",
    b"import sys\nprint('a', file=sys.stderr)\nclass A:\n    pass\na = A()\nraise ValueError('x')\n",
    b"if __name__ == '__main__':\n    print(input())\n",
)
_WITH_NUMPY = b"""
import numpy as np
a = np.arange(10)
print(a.sum(), a.reshape(2, 5), a.mean())
print(np.linalg.inv(np.eye(2)))
"""

_NO_POLICY = PolicyHooks(None, [], [])


def warm_up() -> None:
    """Run a few harmless programs as if they were runs, and discard their output."""
    saved = sys.stdin, sys.argv, sys.modules["__main__"], sys.path[0]
    programs = (*_PROGRAMS, _WITH_NUMPY) if "numpy" in sys.modules else _PROGRAMS
    null, stderr = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), os.dup(2)
    os.dup2(null, 2)  # file descriptor 1 is already there
    try:
        for _ in range(_TIMES):
            for code in programs:
                _run_program(code)
    finally:
        os.dup2(stderr, 2)
        os.close(null)
        os.close(stderr)
        streams.attach(None, 0)
        sys.stdin, sys.argv, sys.modules["__main__"], sys.path[0] = saved


def _run_program(code: bytes) -> None:
    words = memoryview(bytearray(wire.JOURNAL_BYTES)).cast("Q")
    streams.attach(streams.Journal(words), 1 << 20)
    sys.stdin = io.StringIO("line\n")
    main = program.new_main_module()
    program.execute(code, main, _NO_POLICY)
    program.forget(main)
    program.make_independent()
