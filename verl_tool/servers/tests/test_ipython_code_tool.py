"""``python -m verl_tool.servers.tests.test_ipython_code_tool ipython_code --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

from verl_tool.protocol import StepRequest
from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe, command_line

TIMEOUT_SECONDS = 120.0
"""Deadline of the cases that wait for the server's own time limit."""
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


async def _turns(probe: Probe, *turns: tuple[str, str]) -> None:
    """Cells of one trajectory, each with a text that its answer holds."""
    trajectory = probe.new_id()
    for step, (code, expected) in enumerate(turns):
        result = await probe.answer(f"<python>{code}</python>", trajectory_id=trajectory, step=step)
        if expected not in result.observation:
            raise CheckFailed(f"{expected!r} is missing in the answer {result.observation!r:.300} to {code!r:.100}")
    await probe.client.finish([trajectory])


async def _formats(probe: Probe) -> None:
    for action in probe.tool.example_actions:
        trajectory = probe.new_id()
        result = await probe.answer(action, trajectory_id=trajectory, step=0)
        if "2" not in result.observation:
            raise CheckFailed(f"{action!r} was answered {result.observation!r:.200}")
        await probe.client.finish([trajectory])


async def _state(probe: Probe) -> None:
    await _turns(
        probe,
        ("x = 20\nopen('a.txt', 'w').write('kept')", "4"),
        ("x + 1, open('a.txt').read()", "(21, 'kept')"),
        ("def f(): return 1 / 0\nf()", "ZeroDivisionError: division by zero"),
        ("x", "20"),
    )


async def _additions(probe: Probe) -> None:
    await _turns(
        probe,
        ("!echo shell $((6 * 7))", "shell 42"),
        ("import asyncio\nawait asyncio.sleep(0, 'awaited')", "'awaited'"),
        ("%timeit -n 1 -r 1 pass", "per loop"),
        ("%%time\n1", "wall time"),
        ("y = 1\n%who", "y"),
        ("%reset -f\n%who", "empty"),
    )


async def _undone(probe: Probe) -> None:
    await _turns(
        probe,
        ("x = 'before'", "no output"),
        ("x = 'changed'\nwhile True: pass", "as they were before this cell"),
        ("x", "'before'"),
    )


async def _hostile(probe: Probe) -> None:
    for code in HOSTILE:
        trajectory = probe.new_id()
        for step, cell in enumerate((code, "print(6 * 7)")):
            result = await probe.answer(f"<python>{cell}</python>", trajectory_id=trajectory, step=step)
        if "\n42\n" not in result.observation:
            raise CheckFailed(f"print(6 * 7) was answered {result.observation!r:.200} after {code!r}")
        await probe.client.finish([trajectory])


async def _apart(probe: Probe) -> None:
    ids = [probe.new_id() for _ in range(TRAJECTORIES)]
    await probe.answers([StepRequest(each, f"<python>x = {n}</python>", 0) for n, each in enumerate(ids)])
    results = await probe.answers([StepRequest(each, "<python>x * 1000 + 7</python>", 1) for each in ids])
    for n, result in enumerate(results):
        if f"\n{n * 1000 + 7}\n" not in result.observation:
            raise CheckFailed(f"trajectory {n} got {result.observation!r:.100}")
    await probe.client.finish(ids)


async def _once(probe: Probe) -> None:
    trajectory = probe.new_id()
    for step, code in ((0, "n = 0"), (1, "n += 1"), (1, "n += 1")):
        await probe.answer(f"<python>{code}</python>", trajectory_id=trajectory, step=step)
    result = await probe.answer("<python>n</python>", trajectory_id=trajectory, step=2)
    if "1" not in result.observation:
        raise CheckFailed(f"a repeated step was run twice: {result.observation!r:.100}")
    await probe.client.finish([trajectory])


CASES = (
    LiveCase("every example action of GET /tools", _formats),
    LiveCase("names, files and errors from turn to turn", _state),
    LiveCase("commands, await, magics", _additions),
    LiveCase("a cell that is ended is undone", _undone, TIMEOUT_SECONDS),
    LiveCase("hostile: cells that break their interpreter", _hostile, TIMEOUT_SECONDS),
    LiveCase(f"{TRAJECTORIES} trajectories have a state each", _apart, 60.0),
    LiveCase("a repeated step runs once", _once),
)

app = command_line("ipython_code", "ipython_code", CASES, "Check the IPython tool of a live server, case by case.")

if __name__ == "__main__":
    app()
