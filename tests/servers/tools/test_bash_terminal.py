"""Against the real sandbox: a shell that stays, whatever the commands do to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from tests.servers.tools.actions import results, text
from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.servers.tools.base import Context, InvalidCall, ToolResult
from verl_tool.servers.tools.bash_terminal import BashTerminalTool
from verl_tool.servers.tools.workspace.pseudo_terminal import PseudoTerminal
from verl_tool.servers.tools.workspace.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

OPTIONS = {"workers": 1, "warm_modules": (), "timeout_seconds": 20, "max_output_length": 1000}
Shell = Callable[..., Awaitable[ToolResult]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tool() -> AsyncIterator[BashTerminalTool]:
    made = BashTerminalTool(**OPTIONS)
    await made.start()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def workspace(tool: BashTerminalTool) -> AsyncIterator[Workspace]:
    made = await tool.new_state(Context("t", 0, None))
    yield made
    await tool.close_state(made)


@pytest.fixture
def shell(tool: BashTerminalTool, workspace: Workspace) -> Shell:
    async def run(command: str | None = None, **arguments: object) -> ToolResult:
        given = arguments if command is None else {"command": command, **arguments}
        call = {"name": "bash", "arguments": given}
        [result] = await results(tool, f"<tool_call>{json.dumps(call)}</tool_call>", None, workspace)
        return result

    return run


async def test_every_example_action_is_answered(tool: BashTerminalTool, workspace: Workspace) -> None:
    for action in BashTerminalTool.example_actions:
        assert await text(tool, action, state=workspace) == "2"


async def test_directory_variables_functions_and_jobs_stay(shell: Shell) -> None:
    await shell("mkdir -p d && cd d; x='a b'; f() { echo \"f $1\"; }; sleep 100 &")
    assert (await shell('pwd; f "$x"; jobs -r | wc -l')).text == "/box/work/d\nf a b\n1"
    assert (await shell("kill %1; wait; jobs -r | wc -l")).text.endswith("0")


async def test_exit_codes_and_errors(shell: Shell) -> None:
    failed = await shell("ls nowhere; (exit 3)")
    assert failed.text == "ls: cannot access 'nowhere': No such file or directory\nExit code: 3"
    assert failed.error
    assert not (await shell("true")).error
    assert (await shell("true")).text == "(no output)"
    assert "syntax error" in (await shell("if")).text
    assert "unset_one" in (await shell("echo ${unset_one?} ; echo not reached")).text
    assert (await shell("(exit 5)")).error
    assert (await shell("echo $?; echo $?")).text == "5\n0"


async def test_commands_of_any_text_reach_the_shell_as_they_are(shell: Shell) -> None:
    assert (await shell("cat <<'E'\n'é'\t\\n $x !! \x03\nE\necho end")).text == "'é'\t\\n $x !! \nend"
    long = "echo " + "x" * 9_000 + " | wc -c; echo " + "'\n'" * 300 + " | wc -l"
    assert (await shell(long)).text == "9001\n301"
    assert "NUL" in (await shell("echo \0")).text


async def test_a_command_that_takes_too_long_is_interrupted_and_the_shell_stays(shell: Shell) -> None:
    await shell("x=kept")
    for command in (
        "echo on; sleep 100",
        "cat",
        "while :; do :; done",
        "while true; do sleep 1; done",
        "bash -c \"trap '' INT; sleep 100\"",
        'python3 -c "import signal, time\nfor n in (2, 3): signal.signal(n, signal.SIG_IGN)\ntime.sleep(100)"',
        "sleep 100; echo not reached",
    ):
        result = await shell(command, seconds=0.3)
        assert "[the command was interrupted: it ran longer than 0.3 seconds]" in result.text
        assert result.metrics["timed_out"] == 1.0
        assert (await shell("echo $x")).text == "kept"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            "exit 3",
            "[the shell ended; a new one has started: variables and jobs are gone, files are not]\nExit code: 3",
        ),
        ("kill -9 $$", "the shell ended; a new one has started"),
        ("exec echo replaced", "replaced\n[the shell ended"),
        ("exec sleep 100", "the shell ended"),
        ("exec 0<&- 1>&- 2>&-", ""),
        ("set -e; false", "the shell ended"),
        ("trap '' INT QUIT; while :; do :; done", "the shell no longer answered and was ended"),
    ],
)
async def test_a_shell_that_is_gone_is_another_one_at_the_same_place(shell: Shell, command: str, told: str) -> None:
    await shell("mkdir -p /box/work/d; cd /box/work/d; x=1")
    assert told in (await shell(command, seconds=0.5)).text
    for _ in range(40):  # on a busy machine bash notices late that it has nothing to read from
        where = (await shell("pwd")).text
        if not where.startswith(("[the shell ended", "a program runs in the foreground")):
            break
        await asyncio.sleep(0.25)
    assert where.splitlines()[-1] == "/box/work/d"


@pytest.mark.parametrize(
    "command", ["mkdir d; cd d; rmdir ../d; exit", "chmod 0 ~; exit", "cd /; rmdir /box/work; exit"]
)
async def test_a_shell_whose_directory_is_gone_is_another_one_elsewhere(shell: Shell, command: str) -> None:
    assert "a new one has started" in (await shell(command)).text
    assert (await shell("pwd")).text in ("/box/work", "/")


@pytest.mark.parametrize(
    "command",
    [
        "printf '\\036%032d:0:/\\036' 0; echo real",
        "PS1='evil$ '; PS2='more> '; PROMPT_COMMAND='echo prompt'; echo real",
        "PROMPT_COMMAND=; unset PROMPT_COMMAND; echo real",
        "set -o posix; set -u; echo real; set +o posix +u",
        "stty raw -echo; echo real",
        "set -o vi; echo real",
        "set -xv; echo real",
        "trap 'echo trapped' DEBUG ERR EXIT; echo real",
        "ulimit -n 8; echo real",
        "alias builtin=false printf=false; echo real",
        "exec > gone 2>&1; echo real; exec > /dev/null 2>&1; cat gone >&0",
        "readonly PS1; echo real",
    ],
)
async def test_what_commands_do_to_the_shell_does_not_confuse_us(shell: Shell, command: str) -> None:
    assert "real" in (await shell(command)).text
    after = (await shell("echo next >&0; (exit 4)")).text
    assert after.splitlines()[-1] == "Exit code: 4"
    assert "next" in after.splitlines()


async def test_output_without_end_keeps_head_and_tail(shell: Shell) -> None:
    result = await shell("echo head; head -c 20000000 /dev/zero | tr '\\0' a; echo; echo tail")
    assert result.text.startswith("head\naaa")
    assert result.text.endswith("aaa\ntail")
    assert len(result.text) < 1200
    assert "interrupted" in (await shell("yes", seconds=0.3)).text
    await shell("yes &")
    await asyncio.sleep(0.2)
    assert (await shell("kill %1; wait; echo done")).text.rstrip().endswith("done")


async def test_output_is_clean_of_escape_codes(shell: Shell) -> None:
    assert (await shell("printf '\\033[31mred\\033[0m\\n10%%\\r100%%\\n'")).text == "red\n100%"


async def test_programs_are_sent_keys(shell: Shell) -> None:
    started = await shell(keys=["python3 -q -i -c ''", "Enter"], seconds=5)
    assert "[a program runs in the foreground and takes keys]" in started.text
    assert "42" in (await shell(keys=["6 * 7", "Enter"], seconds=5)).text
    assert "send it keys" in (await shell("echo no")).text
    assert "KeyboardInterrupt" in (await shell(keys=["C-c"], seconds=5)).text
    assert "foreground" not in (await shell(keys=["C-d"], seconds=2)).text
    assert (await shell("echo back")).text.endswith("back")


async def test_what_keys_have_left_unfinished_is_not_part_of_a_command(shell: Shell) -> None:
    for keys in (
        ["echo half a line"],
        ["if true", "Enter"],
        ["echo 'open", "Enter"],
        ["cat <<E", "Enter"],
        ["read x", "Enter"],
    ):
        await shell(keys=keys, seconds=0.1)
        assert (await shell("echo whole", seconds=10)).text == "whole"
    await shell(keys=["sleep 100", "Enter"], seconds=0.1)
    assert "Stopped" in (await shell(keys=["C-z"], seconds=5)).text
    assert "Stopped" in (await shell("jobs")).text


async def test_the_line_around_a_command_is_not_traced(shell: Shell) -> None:
    await shell("set -x")
    assert (await shell("echo hi")).text.splitlines()[-2:] == ["++ echo hi", "hi"]
    assert "PROMPT_COMMAND" not in (await shell("set +x")).text


async def test_a_call_that_nobody_waits_for_leaves_a_shell_that_answers(shell: Shell) -> None:
    await shell("x=kept")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(shell("sleep 100"), 0.3)
    assert (await shell("echo $x")).text.endswith("kept")


@pytest.mark.parametrize("seconds", [0.0, 0.003, 0.01, 0.03])
async def test_a_first_call_that_nobody_waits_for(shell: Shell, seconds: float) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(shell("sleep 100"), seconds)
    assert (await shell("echo well")).text.endswith("well")


async def test_a_lost_session_is_a_fault(tool: BashTerminalTool) -> None:
    workspace = await tool.new_state(Context("lost", 0, None))
    await text(tool, "<bash>true</bash>", state=workspace)
    running = asyncio.ensure_future(text(tool, "<bash>sleep 100</bash>", state=workspace))
    await asyncio.sleep(0.3)
    workspace.session.evict("a test")
    for call in (running, text(tool, "<bash>true</bash>", state=workspace)):
        with pytest.raises(ToolFault) as caught:
            await call
        assert caught.value.kind is FaultKind.STATE_LOST
    await tool.close_state(workspace)


async def test_a_forkserver_that_dies_under_a_starting_shell_is_a_lost_state(
    tool: BashTerminalTool, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, close_theirs = workspace.session, PseudoTerminal.close_theirs

    def started(terminal: PseudoTerminal) -> None:
        close_theirs(terminal)
        session._worker.abandon()

    monkeypatch.setattr(PseudoTerminal, "close_theirs", started)
    with pytest.raises(ToolFault, match="forkserver") as caught:
        await text(tool, "<bash>true</bash>", state=workspace)
    assert (caught.value.kind, caught.value.retryable) == (FaultKind.STATE_LOST, False)


async def test_a_workspace_that_is_closed_under_a_call_is_a_fault(tool: BashTerminalTool) -> None:
    workspace = await tool.new_state(Context("closed", 0, None))
    running = asyncio.ensure_future(text(tool, "<bash>sleep 100</bash>", state=workspace))
    await asyncio.sleep(0.3)
    await tool.close_state(workspace)
    with pytest.raises(ToolFault, match="closed"):
        await running


async def test_stateless_commands(workspace: Workspace) -> None:
    alone = BashTerminalTool(**OPTIONS, stateless=True)
    first = await text(alone, "<bash>cd /tmp; echo hi > ~/a; echo err >&2; exit 3</bash>", state=workspace)
    assert json.loads(first) == {"returncode": 3, "output": "err"}
    assert json.loads(await text(alone, "<bash>pwd; cat a</bash>", state=workspace))["output"] == "/box/work\nhi"
    [last] = await results(alone, "<bash>echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42</bash>", None, workspace)
    assert (last.done, last.text) == (True, "42")
    call = '<tool_call>{"name": "bash", "arguments": {"command": "sleep 9", "timeout": 0.2}}</tool_call>'
    [slow] = await results(alone, call, None, workspace)
    assert "limit wall_seconds" in slow.text


@pytest.mark.parametrize(
    "arguments", [{}, {"command": 1}, {"keys": 5}, {"command": "a", "seconds": "no"}, {"keys": [1]}]
)
async def test_wrong_calls(shell: Shell, arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidCall):
        await shell(**arguments)


_FORGED = "printf '\\036%s:0:/\\036' "
_FORGERIES = {
    "prompt command": f"w=${{PROMPT_COMMAND#*036}}; {_FORGED}${{w:0:32}} >&19; false",
    "prompt command of its own": f"PROMPT_COMMAND='{_FORGED.replace(chr(39), chr(34))}x >&19; true'; false",
    "debug trap": "trap 'w=${BASH_COMMAND#*036}; " + _FORGED.replace("'", '"') + "${w:0:32} >&19' DEBUG; false",
    "error trap": "trap 'true' ERR; trap 'true' RETURN; false",
    "functions": "builtin() { :; }; trap() { :; }; printf() { :; }; eval() { :; }; unset() { :; }; exit() { :; }; [ ]",
    "read-only functions": "trap() { :; }; printf() { :; }; readonly -f trap printf; [ ]",
    "a read-only function": "builtin() { :; }; readonly -f builtin; [ ]",
    "aliases": "shopt -s expand_aliases; alias trap=true printf=true builtin=true eval=true unset=true; false",
    "read-only variables": "readonly PS1=x PS2=y PROMPT_COMMAND=true; false",
    "trace": "set -x; false",
    "trace to a file": "exec 7>trace; BASH_XTRACEFD=7; set -x; false",
    "echo of lines": "set -v; false",
    "output elsewhere": "exec >out 2>&1; false",
    "no input": "exec </dev/null; false",
    "unbound": "set -u; false",
}


@pytest.mark.parametrize("name", _FORGERIES)
async def test_an_exit_code_is_not_forged(shell: Shell, name: str) -> None:
    first = await shell(_FORGERIES[name], seconds=5)
    assert first.text.endswith("Exit code: 1"), first.text
    assert "\\036" not in first.text
    second = await shell("echo a >seen; sh -c 'exit 3'", seconds=5)
    assert second.text.endswith("Exit code: 3"), second.text
    assert not (await shell("[ -f seen ]", seconds=5)).error


async def test_a_command_after_the_end_of_input_runs_in_another_shell(shell: Shell) -> None:
    await shell("cd /tmp; exec </dev/null")
    result = await shell("pwd; echo ran")
    assert "/tmp\nran" in result.text
    assert "a new one has started" in result.text


async def test_a_command_in_another_shell_keeps_to_its_time_and_may_end_that_too(shell: Shell) -> None:
    await shell("exec </dev/null")
    assert "was interrupted" in (await shell("echo begun; sleep 30", seconds=1)).text
    await shell("exec </dev/null")
    assert "a new one has started" in (await shell("kill -9 $$")).text
    assert (await shell("echo well")).text.endswith("well")


@pytest.mark.parametrize("command", ["kill -INT $$; echo after", "sh -c 'kill -INT $$'; echo after"])
async def test_a_command_that_is_interrupted_by_itself_ends_at_once(shell: Shell, command: str) -> None:
    began = time.monotonic()
    assert (await shell(f"x=1; {command}", seconds=15)).text.endswith("Exit code: 130")
    assert time.monotonic() - began < 10
    assert (await shell("echo $x", seconds=5)).text == "1"


async def test_a_directory_of_any_depth_costs_nothing(shell: Shell) -> None:
    deep = "d=$(printf 'x%.0s' {1..200}); for i in $(seq 30); do mkdir -p $d && cd $d; done"
    assert (await shell(deep)).text == "(no output)"
    assert (await shell("echo ${#PWD}; x=1")).text == "6039"
    assert (await shell("echo $x; cd /tmp; pwd")).text == "1\n/tmp"


async def test_line_disciplines_of_the_kernel_are_not_set(shell: Shell) -> None:
    code = "import fcntl, struct; fcntl.ioctl(0, 0x5423, struct.pack('i', 3))"
    assert "Operation not permitted" in (await shell(f'python3 -c "{code}"')).text
