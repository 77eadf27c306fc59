"""``python -m verl_tool.servers.tests.test_python_code_tool python --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from verl_tool.servers.tests.live_check import (
    WAITS,
    Batches,
    LiveCase,
    LiveTurn,
    Target,
    command_line,
    examples,
    one_by_one,
    together,
)

BATCH = 64

_ENVIRONMENT = """
import os
words = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL", "RAY_", "CUDA")
found = [name for name in os.environ if any(word in name.upper() for word in words)]
print("CLEAN" if not found else "FOUND", *found)
"""
_CONNECT = """
import socket
try:
    socket.create_connection(({host!r}, {port}), 2).close()
    print("CONNECTED")
except OSError as error:
    print("REFUSED", type(error).__name__)
"""
_READ = """
import pathlib
for path in {paths!r}:
    try:
        print("READ", path, len(pathlib.Path(path).read_bytes()))
    except OSError:
        print("CLOSED", path)
"""
_WRITE = """
import os, sys
for folder in ("/usr", "/etc", os.path.dirname(os.__file__), sys.prefix):
    try:
        open(os.path.join(folder, "verl_tool_check"), "w").close()
        print("WROTE", folder)
    except OSError:
        print("CLOSED", folder)
"""
_LINGER = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
print("parent ends")
"""
_FORKS = """
import os
try:
    while True:
        os.fork()
except OSError:
    pass
"""


def _run(code: str, *contains: str | re.Pattern[str], step: int | None = None, lacks: tuple[str, ...] = ()) -> LiveTurn:
    return LiveTurn(f"<python>\n{code}\n</python>", contains, lacks, step=step)


def _network(target: Target) -> Batches:
    parts = urlsplit(target.url)
    addresses = ((parts.hostname or "127.0.0.1", parts.port or 80), ("1.1.1.1", 53))
    return one_by_one(*(_run(_CONNECT.format(host=host, port=port), "REFUSED") for host, port in addresses))


def _files(target: Target) -> Batches:
    """The canary lies on this machine; it says something only if the server runs here too."""
    with tempfile.NamedTemporaryFile(prefix="verl_tool_check_") as canary:
        canary.write(b"secret")
        canary.flush()
        paths = [canary.name, "/etc/shadow", "/root/.bashrc", str(Path.home() / ".netrc")]
        yield [[_run(_READ.format(paths=paths), *(f"CLOSED {path}" for path in paths), lacks=("READ",))]]
        yield [[_run(_READ.format(paths=["/proc/1/environ"]), re.compile("CLOSED|READ /proc/1/environ 0\n"))]]
    yield [[_run(_WRITE, "CLOSED /usr", lacks=("WROTE",))]]


_ERRORS = (
    _run("print('before')\n1 / 0", "before", "ZeroDivisionError: division by zero", "line 2"),
    _run("1 +", "SyntaxError"),
    _run("import sys; sys.exit(3)", "Exit code: 3"),
    _run("x = 1", "no output"),
)
_STDIN = (
    LiveTurn("<python>print(input()[::-1])</python>", ("olleh",), extra={"stdin": "hello\n"}),
    _run("input()", "EOFError"),
)
_BLOCKS = LiveTurn("```python\nx = 20\n```\nand then\n```python\nprint(x + 1)\n```", ("21",))
_BROKEN = LiveTurn('<tool_call>{"name": "python_code", "arguments": {</tool_call>', ("JSON",), valid=False)
_ENDLESS = _run("print('on', flush=True)\nwhile True: pass", "on", "Execution timed out")
_HUNGRY = _run("parts = []\nwhile True: parts.append(bytearray(64 << 20))", "Memory")
_PROCESSES = (_run(_LINGER, "parent ends"), _run(_FORKS), _run("print(6 * 7)", "42"))
_NUMBERS = (_run(f"print({i} * 1000 + 7)", f"\n{i * 1000 + 7}\n") for i in range(BATCH))
_MIXED = (_run("print('fine')", "fine"), _run("1 / 0"), _run("import os; os.abort()"), _run("print('fine')", "fine"))
_UNIQUE = [_run("import uuid; print(uuid.uuid4())", step=step) for step in (0, 0, 1)]

CASES = (
    examples("2"),
    LiveCase("stdin", one_by_one(*_STDIN)),
    LiveCase("several blocks are one program", one_by_one(_BLOCKS)),
    LiveCase(
        "nothing is kept from turn to turn", one_by_one([_run("leftover = 1"), _run("print(leftover)", "NameError")])
    ),
    LiveCase("errors, exit codes, no output", one_by_one(*_ERRORS)),
    LiveCase("a broken tool call says why", one_by_one(_BROKEN)),
    LiveCase("time limit", one_by_one(_ENDLESS), WAITS),
    LiveCase("memory limit", one_by_one(_HUNGRY), WAITS),
    LiveCase(
        "long output is cut",
        one_by_one(_run("print('a' * 5_000_000)", "left out")),
        holds=lambda answers: len(answers[0]) <= 1_000_000,
    ),
    LiveCase("hostile: secrets in the environment", one_by_one(_run(_ENVIRONMENT, "CLEAN"))),
    LiveCase("hostile: network", _network),
    LiveCase("hostile: files of the host", _files),
    LiveCase("hostile: processes that stay or multiply", one_by_one(*_PROCESSES), WAITS),
    LiveCase(f"a batch of {BATCH} trajectories", together(*_NUMBERS), 60.0),
    LiveCase("a failing program in a batch", together(*_MIXED)),
    LiveCase(
        "a repeated step runs once",
        one_by_one(_UNIQUE),
        holds=lambda answers: answers[0] == answers[1] != answers[2],
    ),
)

app = command_line(__name__, "python", "python_code", CASES)
