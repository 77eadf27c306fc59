"""``python -m verl_tool.servers.tests.test_bash_terminal_tool bash_terminal --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, call, command_line, examples, one_by_one, together

TIMEOUT_SECONDS = 180.0
"""Deadline of the cases that wait for the server's own time limit."""
TRAJECTORIES = 16


def _run(*turns: tuple[str, str]) -> list[LiveTurn]:
    """Commands of one trajectory, each with a text that its answer contains."""
    return [LiveTurn(f"<bash>{command}</bash>", (text,)) for command, text in turns]


def _keys(text: str, *keys: str) -> LiveTurn:
    return LiveTurn(call("bash", keys=keys, seconds=3), (text,))


_STATE = (
    ("mkdir d; cd d; x='a b'; sleep 300 &", "[1]"),
    ('pwd; echo "$x"; jobs -r', "/d\na b\n[1]"),
    ("(exit 3)", "Exit code: 3"),
    ("exit 4", "a new one has started"),
    ("pwd", "/d"),
)
_TOO_LONG = (("x=kept", ""), ("echo on; cat", "was interrupted"), ("echo $x", "kept"))
_PROGRAM = [
    _keys("a program runs in the foreground", "python3 -q", "Enter"),
    _keys("42", "6 * 7", "Enter"),
    _keys("", "C-d"),
    *_run(("echo back", "back")),
]
_HOSTILE = (
    ("PS1='evil$ '; PROMPT_COMMAND='echo evil'; stty raw", ""),
    ("exec 0<&- 1>&- 2>&-", ""),
    ("kill -9 $$", ""),
    ("head -c 20000000 /dev/zero | tr '\\0' a; echo; echo tail", "tail"),
    ("cat /etc/shadow; echo $((6 * 7))", "42"),
)
_APART = [_run((f"x={n}", ""), ("echo $((x * 1000 + 7))", f"\n{n * 1000 + 7}\n")) for n in range(TRAJECTORIES)]

CASES = (
    examples("2"),
    LiveCase("directory, variables, jobs and exit codes from turn to turn", one_by_one(_run(*_STATE))),
    LiveCase(
        "a command that takes too long is interrupted, and the shell stays",
        one_by_one(_run(*_TOO_LONG)),
        TIMEOUT_SECONDS,
    ),
    LiveCase("a program is sent keys", one_by_one(_PROGRAM)),
    LiveCase("hostile: a shell that is broken or flooded", one_by_one(_run(*_HOSTILE)), TIMEOUT_SECONDS),
    LiveCase(f"{TRAJECTORIES} trajectories have a shell each", together(*_APART), 60.0),
)

app = command_line(__name__, "bash_terminal", "bash_terminal", CASES)
