"""``python -m verl_tool.servers.tests.test_ipython_code_tool ipython_code --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

from verl_tool.servers.tests.live_check import WAITS, LiveCase, LiveTurn, command_line, examples, one_by_one, together

TRAJECTORIES = 16
HOSTILE = (
    "import sys\nsys.stdout.close()",
    "import os\nos.close(1)",
    "import os\nos._exit(3)",
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "import os\nwhile True: os.fork()",
    "x = 'a' * (1 << 40)",
    "!kill -9 -1",
)
"""Cells after which another one prints 42 all the same."""
_STATE = (
    ("x = 20\nopen('a.txt', 'w').write('kept')", "4"),
    ("x + 1, open('a.txt').read()", "(21, 'kept')"),
    ("def f(): return 1 / 0\nf()", "ZeroDivisionError: division by zero"),
    ("x", "20"),
)
_ADDITIONS = (
    ("!echo shell $((6 * 7))", "shell 42"),
    ("import asyncio\nawait asyncio.sleep(0, 'awaited')", "'awaited'"),
    ("%timeit -n 1 -r 1 pass", "per loop"),
    ("%%time\n1", "wall time"),
    ("y = 1\n%who", "y"),
    ("%reset -f\n%who", "empty"),
)
_UNDONE = (
    ("x = 'before'", "no output"),
    ("x = 'changed'\nwhile True: pass", "as they were before this cell"),
    ("x", "'before'"),
)


def _cell(code: str, *contains: str, step: int | None = None) -> LiveTurn:
    return LiveTurn(f"<python>{code}</python>", contains, step=step)


_HOSTILE = [[_cell(code), _cell("print(6 * 7)", "\n42\n")] for code in HOSTILE]
_APART = [[_cell(f"x = {n}"), _cell("x * 1000 + 7", f"\n{n * 1000 + 7}\n")] for n in range(TRAJECTORIES)]
_ONCE = [_cell("n = 0", step=0), _cell("n += 1", step=1), _cell("n += 1", step=1), _cell("n", "1", step=2)]

CASES = (
    examples("2"),
    LiveCase("names, files and errors from turn to turn", one_by_one([_cell(*each) for each in _STATE])),
    LiveCase("commands, await, magics", one_by_one([_cell(*each) for each in _ADDITIONS])),
    LiveCase("a cell that is ended is undone", one_by_one([_cell(*each) for each in _UNDONE]), WAITS),
    LiveCase("hostile: cells that break their interpreter", one_by_one(*_HOSTILE), WAITS),
    LiveCase(f"{TRAJECTORIES} trajectories have a state each", together(*_APART), 60.0),
    LiveCase("a repeated step runs once", one_by_one(_ONCE)),
)

app = command_line(__name__, "ipython_code", "ipython_code", CASES)
