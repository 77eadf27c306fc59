"""Verifiers in the real sandbox, in workspaces that a policy has prepared for them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.errors import SandboxError
from verl_tool.sandbox import SandboxPool, SessionLimits
from verl_tool.sandbox.session.command_relay import CommandRelay
from verl_tool.servers.tools.workspace.terminal import Terminal
from verl_tool.servers.tools.workspace.workspace import Workspace
from verl_tool.verification import Verdict, Verification

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

LIMITS = SessionLimits(disk_bytes=2 << 20, total_wall_seconds=20.0)
ANSWER = '[ "$(cat answer.txt)" = 42 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(workers=1, warm_modules=(), for_sessions=True) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def workspace(pool: SandboxPool) -> AsyncIterator[Workspace]:
    session = pool.session(limits=LIMITS)
    await session.start()
    made = Workspace(session)
    yield made
    await made.close()


async def verified(workspace: Workspace, script: str, seconds: float = 10.0, **files: str) -> Verdict:
    packed = {"test.sh": PackedFile(script.encode())} | {k: PackedFile(v.encode(), True) for k, v in files.items()}
    return await workspace.verify(Verification(files=pack_files(packed), timeout_seconds=seconds, env={"LEVEL": "7"}))


async def test_the_workspace_is_judged_as_it_was_left(workspace: Workspace) -> None:
    await workspace.session.write_file("answer.txt", b"41")
    assert (await verified(workspace, ANSWER)).reward == 0.0
    await workspace.session.run("open('answer.txt', 'w').write('42')")
    verdict = await verified(workspace, ANSWER + "; echo the end")
    assert (verdict.reward, verdict.told, verdict.fault) == (1.0, "the end", None)
    assert verdict.seconds > 0


async def test_where_a_verifier_finds_things(workspace: Workspace) -> None:
    await workspace.session.write_file("answer.txt", b"")
    script = "set -e; test -f /app/answer.txt; test -f answer.txt; test $LEVEL = 7; ls $HOME; /tests/helper"
    helper = "#!/bin/sh\necho '{\"reward\": 0.5}' > /logs/verifier/reward.json"
    verdict = await verified(workspace, script, helper=helper)
    assert (verdict.reward, verdict.told) == (0.5, "tmp"), "its home is its own"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("true", "wrote neither reward.json nor reward.txt"),
        ("echo one > /logs/verifier/reward.txt", "no finite number"),
        ("echo 1 > /logs/verifier/reward.txt; exit 3", "the verifier failed: its exit code is 3"),
        ("echo 1 > /logs/verifier/reward.txt; absent", "its exit code is 127"),
        ("echo '{\"reward\": 0}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", ""),
        ("mkdir /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "cannot be read: Is a directory"),
        ("mkfifo /logs/verifier/reward.json", "cannot be read: not a plain file"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "cannot be read"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", "did not end within 0.5 s"),
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", "was ended by signal 9"),
    ],
)
async def test_a_verifier_that_does_not_say_so_gives_no_reward(workspace: Workspace, script: str, told: str) -> None:
    verdict = await verified(workspace, script, 0.5)
    assert verdict.reward == 0.0
    assert told in verdict.told


FORGERY = "echo 'echo 1 > /logs/verifier/reward.txt'"
IN_PYTHON = 'echo \'open("/logs/verifier/reward.txt", "w").write("1")\''


@pytest.mark.parametrize(
    "planted",
    [
        "mkdir -p /logs/verifier; mkdir -p /box/logs/verifier; echo 1 > /box/logs/verifier/reward.txt",
        "mkdir -p /box/elsewhere/verifier; ln -s elsewhere /box/logs; echo 1 > /box/elsewhere/verifier/reward.txt",
        "mkdir -p /box/logs/verifier; mkfifo /box/logs/verifier/reward.json",
        f"mkdir -p /box/tests; {IN_PYTHON} > /box/tests/sitecustomize.py; ln -s work /box/solution",
        f"ln -s /box/work /box/tests; {FORGERY} > test.sh",
        f"mkdir bin; {FORGERY} | tee .bashrc .bash_profile .profile bin/cat; chmod +x bin/cat",
        f"for f in sitecustomize usercustomize json; do {IN_PYTHON} > $f.py; done;"
        " mkdir -p $(python3 -m site --user-site); cp usercustomize.py $(python3 -m site --user-site)",
    ],
)
async def test_what_a_policy_leaves_behind_changes_no_verdict(workspace: Workspace, planted: str) -> None:
    await workspace.session.exec(planted)
    verdict = await verified(workspace, "cat absent.txt; cd /tests; python3 -c 'import json' || true")
    assert verdict.reward == 0.0
    assert "wrote neither" in verdict.told
    await workspace.session.write_file("answer.txt", b"42")
    assert (await verified(workspace, ANSWER)).reward == 1.0, "and harms no answer that is right"


async def test_what_a_policy_leaves_running_is_ended(workspace: Workspace) -> None:
    forge = (
        "while true; do mkdir -p /box/logs/verifier 2>/dev/null; echo 1 2>/dev/null > /box/logs/verifier/reward.txt;"
        " cp -r /tests/. /box/work/seen 2>/dev/null; done"
    )
    terminal = workspace.part(Terminal)
    await terminal.run(f"setsid bash -c '{forge}' & disown", 5.0, 1000)
    cell = f"import os, subprocess\nif os.fork() == 0:\n  os.setsid(); os.execvp('bash', ['bash', '-c', {forge!r}])"
    await workspace.session.run(cell)
    verdict = await verified(workspace, "sleep 0.3; ls; cat /proc/[0-9]*/comm")
    told = verdict.told.splitlines()
    assert (verdict.reward, told.count("bash"), "seen" in told) == (0.0, 1, False), verdict
    again = await workspace.session.run("1 + 1", interactive=True)
    assert again.stdout == "2\n", "the workspace can be used further"


async def test_a_full_disk_is_no_matter(workspace: Workspace) -> None:
    await workspace.session.exec("echo 42 > answer.txt; head -c 10000000 /dev/zero > large")
    assert (await verified(workspace, ANSWER)).reward == 1.0


async def test_the_verifier_changes_nothing_in_the_workspace(workspace: Workspace) -> None:
    await workspace.session.exec("echo 42 > answer.txt; chmod 400 answer.txt; mkdir locked; chmod 0 locked")
    script = "rm -f answer.txt; rmdir locked; ! in_workspace cat /tests/test.sh 2> /dev/null"
    script += " && in_workspace ls > /logs/verifier/ls"
    verdict = await verified(
        workspace, f"{script}; cat /logs/verifier/ls; stat -Lc %a /app; in_workspace stat -c %a /app/answer.txt"
    )
    assert verdict.told.splitlines()[-4:] == ["answer.txt", "locked", "700", "400"], verdict


async def test_the_workspaces_programs_see_nothing_of_the_verifier(workspace: Workspace) -> None:
    """Another user, other processes, other folders, no descriptors, and no way to the memory of the verifier."""
    look = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
descriptors = [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 3]
pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
others = [pid for pid in pids if pid not in (1, os.getpid(), os.getppid())]
for pid in range(1, 400):
    assert pid in (os.getpid(), os.getppid()) or libc.ptrace(16, pid, 0, 0) == -1
    assert pid == os.getpid() or libc.syscall(438, os.pidfd_open(pid) if pid in pids else -1, 0, 0) == -1
print(json.dumps([others, os.path.exists("/tests"), os.path.exists("/logs"), os.path.exists("/box/verifier"),
    descriptors, os.getuid()]))
"""
    script = (
        "sleep 100 & cat > /tmp/look.py; id -u > /logs/verifier/uid; set -e; "
        'in_workspace python3 -c "$(cat /tests/look.py)"; cat /logs/verifier/uid'
    )
    verdict = await verified(workspace, script, **{"look.py": look})
    seen, uid = verdict.told.splitlines()[-2:]
    others, *found, own = json.loads(seen)
    assert (others, found) == ([], [False, False, False, []]), verdict
    assert own != int(uid) or os.getuid() != 0


async def test_how_the_workspaces_code_is_run_for_a_verifier(workspace: Workspace) -> None:
    await workspace.session.write_file("add.py", b"def add(a, b): print('adding'); return a + b")
    check = r"""
from in_workspace import WorkspaceError, evaluate, run
assert evaluate("from add import add; result = [add(*each) for each in given]", [[1, 2], ["a", "b"]]) == [3, "ab"]
command, files = "cat in.txt; tee out.txt; echo no >&2; exit 4", {"in.txt": b"in "}
result = run(command, stdin="x\0", files=files, read=["out.txt", "absent"])
assert (result.exit_code, result.limit_hit, result.stdout_bytes, result.stderr) == (4, None, b"in x\0", "no\n")
assert result.files == {"out.txt": b"x\0", "absent": None} and not result.truncated
result = run(["sleep", "50"], seconds=0.3)
assert (result.exit_code, result.limit_hit) == (None, "wall_seconds")
assert run("kill -9 $$").limit_hit == "signal 9"
assert run("yes", seconds=2).truncated
assert run("echo $A; pwd", env={"A": "1"}, cwd="/tmp").stdout == "1\n/box/tmp\n"
codes = "result = open", "raise ValueError", "1", "import os; os._exit(0)", "result = given[0]", "result = []\n" * 300
for code in codes:
    try:
        print(code, evaluate(code))
    except WorkspaceError as error:
        assert "gave no answer" in str(error) or "not JSON" in str(error), error
    else:
        assert code.startswith("result = []")
try:
    run("true", files={"/etc/x": ""})
except WorkspaceError as error:
    assert "cannot do that" in str(error)
else:
    raise AssertionError
open("/logs/verifier/reward.txt", "w").write("1")
"""
    script = "python3 /tests/use.py && echo 4 | in_workspace --seconds 5 cat && ! in_workspace false"
    verdict = await verified(workspace, script, 30.0, **{"use.py": check})
    assert (verdict.reward, verdict.told.splitlines()[-1:]) == (1.0, ["4"]), verdict.told


async def test_a_sandbox_that_fails_is_no_verdict(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise SandboxError("broken")

    monkeypatch.setattr(CommandRelay, "_run", fail)
    with pytest.raises(SandboxError, match="broken"):
        await verified(workspace, "in_workspace true; echo 1 > /logs/verifier/reward.txt")


async def test_verifications_do_not_wait_for_each_other_for_ever() -> None:
    """A verifier has the turn in which its commands in the workspace are run."""
    async with SandboxPool(workers=1, warm_modules=(), for_sessions=True, max_concurrent=1) as pool:
        sessions = [pool.session(limits=LIMITS) for _ in range(3)]
        for session in sessions:
            await session.start()
        script = "in_workspace true && echo 1 > /logs/verifier/reward.txt"
        verdicts = await asyncio.gather(*(verified(Workspace(session), script, 20.0) for session in sessions))
        assert [verdict.reward for verdict in verdicts] == [1.0, 1.0, 1.0]


async def test_so_are_folders_that_were_moved(workspace: Workspace) -> None:
    await workspace.session.exec("mv /box/work /box/mine; ln -s mine /box/work", cwd="/")
    verdict = await verified(workspace, "echo 1 > /logs/verifier/reward.txt")
    assert (verdict.reward, verdict.told) == (0.0, "the trajectory moved the folders of its workspace")


async def test_a_trajectory_cannot_use_up_the_verifiers_time(pool: SandboxPool) -> None:
    session = pool.session(limits=SessionLimits(total_wall_seconds=0.3))
    await session.start()
    workspace = Workspace(session)
    try:
        await session.exec("sleep 0.5")
        assert (await session.exec("true")).limit_hit == "total_wall_seconds"
        assert (await verified(workspace, "echo 1 > /logs/verifier/reward.txt")).reward == 1.0
    finally:
        await asyncio.wait_for(workspace.close(), 20)
