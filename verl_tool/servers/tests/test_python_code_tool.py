"""``python -m verl_tool.servers.tests.test_python_code_tool python --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from verl_tool.protocol import StepRequest
from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe, command_line

BATCH = 64
TIMEOUT_SECONDS = 120.0
"""Deadline of the cases that wait for the server's own time limit."""

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


def _python(code: str) -> str:
    return f"<python>\n{code}\n</python>"


async def _formats(probe: Probe) -> None:
    for action in probe.tool.example_actions:
        await probe.expect(action, "2")


async def _stdin(probe: Probe) -> None:
    await probe.expect(_python("print(input()[::-1])"), "olleh", extra={"stdin": "hello\n"})
    await probe.expect(_python("input()"), "EOFError")


async def _blocks(probe: Probe) -> None:
    await probe.expect("```python\nx = 20\n```\nand then\n```python\nprint(x + 1)\n```", "21")


async def _fresh(probe: Probe) -> None:
    trajectory = probe.new_id()
    await probe.answer(_python("leftover = 1"), trajectory_id=trajectory, step=0)
    result = await probe.answer(_python("print(leftover)"), trajectory_id=trajectory, step=1)
    if "NameError" not in result.observation:
        raise CheckFailed(f"a name of an earlier turn is known: {result.observation!r:.200}")


async def _errors(probe: Probe) -> None:
    await probe.expect(_python("print('before')\n1 / 0"), "before", "ZeroDivisionError: division by zero", "line 2")
    await probe.expect(_python("1 +"), "SyntaxError")
    await probe.expect(_python("import sys; sys.exit(3)"), "Exit code: 3")
    await probe.expect(_python("x = 1"), "no output")


async def _broken_call(probe: Probe) -> None:
    result = await probe.answer('<tool_call>{"name": "python_code", "arguments": {</tool_call>')
    if result.valid or "JSON" not in result.observation:
        raise CheckFailed(f"broken JSON was answered valid={result.valid}, {result.observation!r:.200}")


async def _timeout(probe: Probe) -> None:
    await probe.expect(_python("print('on', flush=True)\nwhile True: pass"), "on", "Execution timed out")


async def _memory(probe: Probe) -> None:
    await probe.expect(_python("parts = []\nwhile True: parts.append(bytearray(64 << 20))"), "Memory")


async def _long_output(probe: Probe) -> None:
    result = await probe.expect(_python("print('a' * 5_000_000)"), "left out")
    if len(result.observation) > 1_000_000:
        raise CheckFailed(f"the observation has {len(result.observation)} characters")


async def _environment(probe: Probe) -> None:
    await probe.expect(_python(_ENVIRONMENT), "CLEAN")


async def _network(probe: Probe) -> None:
    parts = urlsplit(probe.client.url)
    for host, port in ((parts.hostname or "127.0.0.1", parts.port or 80), ("1.1.1.1", 53)):
        await probe.expect(_python(_CONNECT.format(host=host, port=port)), "REFUSED")


async def _files(probe: Probe) -> None:
    """The canary lies on this machine; it says something only if the server runs here too."""
    with tempfile.NamedTemporaryFile(prefix="verl_tool_check_") as canary:
        canary.write(b"secret")
        canary.flush()
        paths = [canary.name, "/etc/shadow", "/root/.bashrc", str(Path.home() / ".netrc"), "/proc/1/environ"]
        await probe.hides(_python(_READ.format(paths=paths[:-1])), "READ")
        result = await probe.answer(_python(_READ.format(paths=paths[-1:])))
        if "READ" in result.observation and "READ /proc/1/environ 0" not in result.observation:
            raise CheckFailed(f"the environment of process 1 can be read: {result.observation!r:.200}")
    result = await probe.hides(_python(_WRITE), "WROTE")
    if "CLOSED /usr" not in result.observation:
        raise CheckFailed(f"the writing program did not run: {result.observation!r:.200}")


async def _processes(probe: Probe) -> None:
    await probe.expect(_python(_LINGER), "parent ends")
    await probe.answer(_python(_FORKS))
    await probe.expect(_python("print(6 * 7)"), "42")


async def _batch(probe: Probe) -> None:
    requests = [StepRequest(probe.new_id(), _python(f"print({i} * 1000 + 7)")) for i in range(BATCH)]
    for i, result in enumerate(await probe.answers(requests)):
        if f"\n{i * 1000 + 7}\n" not in result.observation:
            raise CheckFailed(f"entry {i} of the batch got {result.observation!r:.100}")


async def _mixed_batch(probe: Probe) -> None:
    programs = ["print('fine')", "1 / 0", "import os; os.abort()", "print('fine')"]
    results = await probe.answers([StepRequest(probe.new_id(), _python(code)) for code in programs])
    if "fine" not in results[0].observation or "fine" not in results[3].observation:
        raise CheckFailed("a program that fails cost its neighbours their answers")


async def _repeated_step(probe: Probe) -> None:
    trajectory, program = probe.new_id(), _python("import uuid; print(uuid.uuid4())")
    first = await probe.answer(program, trajectory_id=trajectory, step=0)
    again = await probe.answer(program, trajectory_id=trajectory, step=0)
    later = await probe.answer(program, trajectory_id=trajectory, step=1)
    if first.observation != again.observation:
        raise CheckFailed("a repeated step was run a second time")
    if first.observation == later.observation:
        raise CheckFailed("the next step was answered with the answer to the one before")


CASES = (
    LiveCase("every example action of GET /tools", _formats),
    LiveCase("stdin", _stdin),
    LiveCase("several blocks are one program", _blocks),
    LiveCase("nothing is kept from turn to turn", _fresh),
    LiveCase("errors, exit codes, no output", _errors),
    LiveCase("a broken tool call says why", _broken_call),
    LiveCase("time limit", _timeout, TIMEOUT_SECONDS),
    LiveCase("memory limit", _memory, TIMEOUT_SECONDS),
    LiveCase("long output is cut", _long_output),
    LiveCase("hostile: secrets in the environment", _environment),
    LiveCase("hostile: network", _network),
    LiveCase("hostile: files of the host", _files),
    LiveCase("hostile: processes that stay or multiply", _processes, TIMEOUT_SECONDS),
    LiveCase(f"a batch of {BATCH} trajectories", _batch, 60.0),
    LiveCase("a failing program in a batch", _mixed_batch),
    LiveCase("a repeated step runs once", _repeated_step),
)

app = command_line("python", "python_code", CASES, "Check the Python tool of a live server, case by case.")

if __name__ == "__main__":
    app()
