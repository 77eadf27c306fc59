"""``python -m verl_tool.servers.tests.test_bash_terminal_tool bash_terminal --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

import json

from verl_tool.protocol import StepRequest
from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe, command_line

TIMEOUT_SECONDS = 180.0
"""Deadline of the cases that wait for the server's own time limit."""
TRAJECTORIES = 16


def _keys(*keys: str) -> str:
    call = {"name": "bash", "arguments": {"keys": keys, "seconds": 3}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


async def _turns(probe: Probe, *turns: tuple[str, str]) -> None:
    """Commands, or whole calls, of one trajectory, each with a text that its answer holds."""
    trajectory = probe.new_id()
    for step, (command, expected) in enumerate(turns):
        action = command if command.startswith(("<", "```")) else f"<bash>{command}</bash>"
        result = await probe.answer(action, trajectory_id=trajectory, step=step)
        if expected not in result.observation:
            raise CheckFailed(f"{expected!r} is missing in the answer {result.observation!r:.300} to {command!r:.100}")
    await probe.client.finish([trajectory])


async def _formats(probe: Probe) -> None:
    for action in probe.tool.example_actions:
        await _turns(probe, (action, "2"))


async def _state(probe: Probe) -> None:
    await _turns(
        probe,
        ("mkdir d; cd d; x='a b'; sleep 300 &", "[1]"),
        ('pwd; echo "$x"; jobs -r', "/d\na b\n[1]"),
        ("(exit 3)", "Exit code: 3"),
        ("exit 4", "a new one has started"),
        ("pwd", "/d"),
    )


async def _too_long(probe: Probe) -> None:
    await _turns(probe, ("x=kept", ""), ("echo on; cat", "was interrupted"), ("echo $x", "kept"))


async def _programs(probe: Probe) -> None:
    await _turns(
        probe,
        (_keys("python3 -q", "Enter"), "a program runs in the foreground"),
        (_keys("6 * 7", "Enter"), "42"),
        (_keys("C-d"), ""),
        ("echo back", "back"),
    )


async def _hostile(probe: Probe) -> None:
    await _turns(
        probe,
        ("PS1='evil$ '; PROMPT_COMMAND='echo evil'; stty raw", ""),
        ("exec 0<&- 1>&- 2>&-", ""),
        ("kill -9 $$", ""),
        ("head -c 20000000 /dev/zero | tr '\\0' a; echo; echo tail", "tail"),
        ("cat /etc/shadow; echo $((6 * 7))", "42"),
    )


async def _apart(probe: Probe) -> None:
    ids = [probe.new_id() for _ in range(TRAJECTORIES)]
    await probe.answers([StepRequest(each, f"<bash>x={n}</bash>", 0) for n, each in enumerate(ids)])
    results = await probe.answers([StepRequest(each, "<bash>echo $((x * 1000 + 7))</bash>", 1) for each in ids])
    for n, result in enumerate(results):
        if f"\n{n * 1000 + 7}\n" not in result.observation:
            raise CheckFailed(f"trajectory {n} got {result.observation!r:.100}")
    await probe.client.finish(ids)


CASES = (
    LiveCase("every example action of GET /tools", _formats),
    LiveCase("directory, variables, jobs and exit codes from turn to turn", _state),
    LiveCase("a command that takes too long is interrupted, and the shell stays", _too_long, TIMEOUT_SECONDS),
    LiveCase("a program is sent keys", _programs),
    LiveCase("hostile: a shell that is broken or flooded", _hostile, TIMEOUT_SECONDS),
    LiveCase(f"{TRAJECTORIES} trajectories have a shell each", _apart, 60.0),
)

app = command_line("bash_terminal", "bash_terminal", CASES, "Check the shell of a live server, case by case.")

if __name__ == "__main__":
    app()
