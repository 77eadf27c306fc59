"""What a session keeps from call to call, what it undoes, what it tells, and what it may use."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from verl_tool.errors import ConfigError, SandboxError
from verl_tool.sandbox import Limits, Policy, SandboxPool, Session, SessionLimits

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]
needs_groups = pytest.mark.skipif(
    not any(os.access(f"/sys/fs/cgroup/{place}cgroup.procs", os.W_OK) for place in ("", "memory/")),
    reason="control groups cannot be made here",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(
        workers=1, warm_modules=("random", "threading"), policy=Policy(pre_import=("math",))
    ) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def session(pool: SandboxPool) -> AsyncIterator[Session]:
    async with pool.session(limits=SessionLimits(wall_seconds=20), files={"in/a.txt": b"given"}) as session:
        yield session


async def shown(session: Session, code: str) -> str:
    return (await session.run(code, interactive=True)).output


async def test_state_goes_on(session: Session) -> None:
    await session.run("import json\nx = [1]\ndef f(): return x\nfile = open('in/a.txt')\nfile.read(2)")
    await session.run("x.append(2)\nraise ValueError('after it')")
    assert await shown(session, "json.dumps(f()), file.read(), math.floor(2.5)") == "('[1, 2]', 'ven', 2)\n"


async def test_each_cell_has_its_own_output_and_input(session: Session) -> None:
    first = await session.run("import sys\nprint('a', end='')\nprint('b', file=sys.stderr)\nprint(input())", stdin="in")
    assert (first.stdout, first.stderr, first.output) == ("ain\n", "b\n", "ab\nin\n")
    second = await session.run("print('c')\ninput()")
    assert second.stdout == "c\n"
    assert second.stderr.endswith("EOFError: EOF when reading a line\n")
    assert (second.exit_code, second.state, second.notes) == (1, "kept", ())


async def test_an_interactive_cell_shows_its_last_value_and_may_await(session: Session) -> None:
    assert await shown(session, "y = 1\n'a' * 3") == "'aaa'\n"
    assert await shown(session, "_ + 'b'\n") == "'aaab'\n"
    assert await shown(session, "None") == ""
    assert await shown(session, "import asyncio\nv = await asyncio.sleep(0, 5)\nawait asyncio.sleep(0, v + 1)") == "6\n"
    assert (await session.run("1 + 1")).output == ""


async def test_a_traceback_shows_the_lines_of_cells_and_nothing_of_ours(session: Session) -> None:
    await session.run("def f(x):\n    return 1 / x")
    lines = (await session.run("y = 2\nf(0)", interactive=True)).stderr.splitlines()
    assert lines[:3] == ["Traceback (most recent call last):", '  File "<cell 2>", line 2, in <module>', "    f(0)"]
    assert lines[3:5] == ['  File "<cell 1>", line 2, in f', "    return 1 / x"]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "interpreter_process" not in " ".join(lines)
    syntax = await session.run("print('x'")
    assert "SyntaxError: '(' was never closed" in syntax.stderr
    assert "Traceback" not in syntax.stderr


@pytest.mark.parametrize(
    ("code", "exit_code", "killed_by", "limit"),
    [
        ("while True: pass", None, signal.SIGKILL, "wall_seconds"),
        (
            "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)",
            None,
            signal.SIGKILL,
            "wall_seconds",
        ),
        ("import os; os._exit(7)", 7, None, None),
        ("import ctypes; ctypes.string_at(0)", None, signal.SIGSEGV, None),
        ("import os, signal; os.kill(0, signal.SIGTERM)", None, signal.SIGTERM, None),
    ],
)
async def test_a_cell_that_does_not_end_is_undone(
    session: Session, code: str, exit_code: int | None, killed_by: int | None, limit: str | None
) -> None:
    await session.run("x = 1")
    result = await session.run(f"x = 2\nopen('left.txt', 'w').write('left')\nprint('said')\n{code}", wall_seconds=1)
    assert (result.state, result.stdout) == ("rolled_back", "said\n")
    assert (result.exit_code, result.signal, result.limit_hit) == (exit_code, killed_by, limit)
    assert "what it wrote to files, shared memory, pipes and sockets remains" in result.notes[0]
    assert await shown(session, "x, open('left.txt').read()") == "(1, 'left')\n"


@pytest.mark.parametrize(
    "code",
    [
        "sys.stdout.close(); sys.stderr.close()",
        "os.close(0); os.close(1); os.close(2)",
        "sys.stdout.detach().detach()",
        "sys.stdout.buffer.raw.close()",
        "sys.stdout = sys.stderr = sys.__stdout__ = None",
        "class Odd:\n    closed = property(lambda self: 1 / 0)\nsys.stdout = Odd()",
        "with open('f', 'w') as sys.stdout: print('x')",
    ],
)
async def test_a_cell_that_closes_its_streams_closes_its_own_alone(session: Session, code: str) -> None:
    assert (await session.run(f"import os, sys\n{code}")).state == "kept"
    later = await session.run("print('out')\nprint('err', file=sys.stderr)\nos.system('echo shell')")
    assert (later.output, later.stderr, later.exit_code) == ("out\nerr\nshell\n", "err\n", 0)


async def test_a_cell_that_is_not_counted_does_not_move_the_numbers(session: Session) -> None:
    await session.run("x = 1", counted=False)
    assert 'File "<cell 1>", line 1' in (await session.run("1 / 0")).stderr
    assert 'File "<cell>", line 1' in (await session.run("1 / 0", counted=False)).stderr
    assert 'File "<cell 2>", line 1' in (await session.run("1 / 0")).stderr


async def test_exit_ends_the_cell_alone(session: Session) -> None:
    result = await session.run("x = 5\nimport sys; sys.exit(3)")
    assert (result.exit_code, result.state) == (3, "kept")
    assert await shown(session, "x") == "5\n"


async def test_what_no_fork_carries_is_ended_and_told(session: Session) -> None:
    code = (
        "import random, subprocess, threading, time\nrandom.seed(1)\nbefore = random.getstate()\n"
        "def later():\n    time.sleep(0.3); open('late.txt', 'w')\n"
        "for _ in range(2): threading.Thread(target=later).start()\n"
        "child = subprocess.Popen(['sleep', '600'])"
    )
    result = await session.run(code)
    assert (result.state, result.ended_threads, result.ended_processes) == ("kept", 2, 1)
    assert [note.split(":")[0] for note in result.notes] == [
        "Threads left running by the cell were ended",
        "Processes left running by the cell were ended",
    ]
    await asyncio.sleep(0.5)
    seen = "import os\nos.path.exists('late.txt'), threading.active_count(), random.getstate() == before"
    assert await shown(session, seen) == "(False, 1, True)\n"
    assert await shown(session, "sum(name.isdigit() for name in os.listdir('/proc'))") == "3\n"


async def test_a_program_that_ends_its_own_interpreter_is_told_so(session: Session) -> None:
    await session.run("x = 1\nopen('kept.txt', 'w').write('kept')")
    result = await session.run("import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(30)")
    assert (result.state, result.limit_hit) == ("lost", None)
    assert result.wall_seconds < 10
    assert result.notes == ("All variables are lost, and the next cell starts with a fresh interpreter; files remain.",)
    assert await shown(session, "open('kept.txt').read(), 'x' in globals()") == "('kept', False)\n"


async def test_an_interpreter_that_dies_between_calls_is_told_of(session: Session) -> None:
    await session.run("x = 1")
    assert session._worker is not None
    forkserver = psutil.Process(session._worker.pid)
    uid = await _uid(session)
    interpreter = next(each for each in forkserver.children(recursive=True) if each.uids().real == uid)
    interpreter.kill()
    await asyncio.sleep(0.3)
    result = await session.run("open('ran', 'w')")
    assert (result.state, result.stdout, result.exit_code) == ("lost", "", None)
    assert await shown(session, "import os\n'x' in globals(), os.path.exists('ran')") == "(False, False)\n"


async def _uid(session: Session) -> int:
    return int((await session.exec("id -u")).stdout)


async def test_many_cells_leave_nothing_behind(session: Session) -> None:
    for _ in range(30):
        await session.run("import os\nnumber = globals().get('number', 0) + 1\nprint('x' * 1000)")
    look = "number, sorted(os.listdir('/proc/self/fd')), sum('memfd' in line for line in open('/proc/self/maps'))"
    number, rest = (await shown(session, look)).split(", ", 1)
    assert number == "(30"
    descriptors = rest.split("]")[0].count("'") // 2
    assert descriptors <= 6
    assert rest.endswith("], 1)\n")


async def test_two_sessions_see_nothing_of_each_other(pool: SandboxPool, session: Session) -> None:
    async with pool.session() as other:
        await asyncio.gather(session.run("x = 1\nopen('mine', 'w')"), other.run("x = 2"))
        look = "import os\nx, os.listdir(), os.getuid()"
        ours, theirs = await asyncio.gather(shown(session, look), shown(other, look))
        assert ours.startswith("(1, [")
        assert "'mine'" in ours
        assert theirs.startswith("(2, [], ")
        assert ours.split()[-1] != theirs.split()[-1]


async def test_calls_of_one_session_take_turns(session: Session) -> None:
    await session.run("n = 0")
    await asyncio.gather(*(session.run(f"n = n * 2 + {i % 2}") for i in range(6)), session.exec("true"))
    assert await shown(session, "n") == f"{0b010101}\n"


async def test_commands_share_the_files(session: Session) -> None:
    result = await session.exec("pwd; cat in/a.txt; cat; echo $WORD >&2; exit 4", stdin="typed", env={"WORD": "w"})
    assert (result.stdout, result.stderr, result.exit_code) == ("/box/work\ngiventyped", "w\n", 4)
    assert (await session.exec(["printf", "%s", "$HOME"], cwd="in")).stdout == "$HOME"
    await session.exec("echo two > in/b.txt; cd in; mkdir c", cwd="/box/work")
    assert await shown(session, "import os\nsorted(os.listdir('in'))") == "['a.txt', 'b.txt', 'c']\n"


async def test_a_command_ends_with_all_that_it_started(session: Session) -> None:
    result = await session.exec("(sleep 600; echo late > late.txt) & setsid sleep 600 & echo $$")
    assert result.ok
    slow = await session.exec("trap '' TERM; sleep 600", wall_seconds=0.5)
    assert (slow.limit_hit, slow.timed_out) == ("wall_seconds", True)
    look = await session.exec("ps -e -o comm=")
    assert "sleep" not in look.stdout
    assert len(look.stdout.splitlines()) <= 3


async def test_a_folder_that_the_programs_have_locked_or_removed_is_their_own_doing(session: Session) -> None:
    assert (await session.exec("chmod 0 /box/work")).ok
    assert (await session.exec("true")).stderr == "/box/work: Permission denied\n"
    assert (await session.exec("chmod 700 /box/work && rm -r /box/work", cwd="/")).ok
    assert (await session.exec("true")).exit_code == 127
    assert await shown(session, "1 + 1") == "2\n"


async def test_commands_that_cannot_be_run(session: Session) -> None:
    absent = await session.exec(["nonsense-program"])
    assert (absent.exit_code, absent.stderr) == (127, "nonsense-program: No such file or directory\n")
    nowhere = await session.exec("true", cwd="nowhere")
    assert (nowhere.exit_code, nowhere.stderr) == (127, "/box/work/nowhere: No such file or directory\n")
    assert (await session.exec(["a\0b"])).exit_code == 126
    with pytest.raises(ConfigError, match="no words"):
        await session.exec([])


async def test_a_terminal_stays_beside_the_calls(session: Session) -> None:
    ours, theirs = pty.openpty()
    try:
        shell = await session.spawn(["bash", "--norc"], streams=(theirs, theirs, theirs), terminal=True)
        os.write(ours, b"cd in; v=7; tty=$(test -t 0 && echo yes); sleep 600\n")
        assert await shown(session, "1 + 1") == "2\n"
        await asyncio.sleep(0.3)
        os.write(ours, b"\x03")
        os.write(ours, b"echo $v $tty $PWD > ../seen.txt\n")
        await waited(session, "seen.txt")
        assert await session.read_file("seen.txt") == b"7 yes /box/work/in\n"
        assert shell.running
        shell.kill()
        assert (await shell.wait()).gone
    finally:
        os.close(ours)
        os.close(theirs)


async def waited(session: Session, path: str) -> None:
    for _ in range(100):
        if (await session.exec(["test", "-s", path])).ok:
            return
    raise AssertionError(f"{path} is still empty")


async def test_a_branch_has_the_same_state_and_its_own_files(session: Session) -> None:
    await session.run("import os, random\nx = [1]\nopen('/box/work/f.txt', 'w').write('both')\nos.chdir('in')")
    branch = await session.fork()
    try:
        for each, word in ((session, "one"), (branch, "two"), (session, "three")):
            code = f"x.append({word!r})\nopen('/box/work/f.txt', 'a').write({word!r})\nopen('here.txt', 'a').write('!')"
            await each.run(code)
        look = "x, open('/box/work/f.txt').read(), os.getcwd(), open('here.txt').read(), random.random()"
        ours, theirs = await shown(session, look), await shown(branch, look)
        assert ours.startswith("([1, 'one', 'three'], 'bothonethree', '/box/work/in', '!!', ")
        assert theirs.startswith("([1, 'two'], 'bothtwo', '/box/work/in', '!', ")
        assert ours.split()[-1] == theirs.split()[-1]
        assert (await branch.exec("cat f.txt in/here.txt")).stdout == "bothtwo!"
        assert (await session.read_file("f.txt"), await branch.read_file("f.txt")) == (b"bothonethree", b"bothtwo")
        with pytest.raises(SandboxError, match="shares its folders"):
            await branch.spawn("true", streams=(0, 1, 2))
    finally:
        await branch.close()
    assert await shown(session, "x, os.listdir('/box')") == "([1, 'one', 'three'], ['shm', 'tmp', 'work'])\n"


async def test_a_branch_outlives_its_origin_and_what_happens_to_the_other(pool: SandboxPool) -> None:
    bomb = "import os, time\nx = 0\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)"
    async with pool.session(files={"a": b"a"}, limits=SessionLimits(processes=16)) as origin:
        await origin.run("x = 1")
        branch = await origin.fork()
        undone = await branch.run(bomb, wall_seconds=0.5)
        assert (undone.state, undone.limit_hit) == ("rolled_back", "wall_seconds")
        assert await shown(origin, "x") == "1\n"
        third = await branch.fork()
        await third.run("x = 3")
    try:
        assert await shown(branch, "x, open('a').read()") == "(1, 'a')\n"
        lost = await branch.run("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(9)")
        assert lost.state == "lost"
        assert (await third.run("x")).state == "lost"
        assert await shown(third, "open('a').read()") == "'a'\n"
    finally:
        await asyncio.gather(branch.close(), third.close())
    assert pool.stats().sessions <= 1


async def test_what_cannot_be_copied_is_refused(pool: SandboxPool) -> None:
    async with pool.session(limits=SessionLimits(disk_bytes=1 << 20)) as session:
        program = await session.spawn("sleep 600", streams=(0, 1, 2))
        with pytest.raises(SandboxError, match="running cannot be copied") as caught:
            await session.fork()
        assert not caught.value.retryable
        program.kill()
        await program.wait()
        await session.run("open('big', 'wb').write(bytes(700_000))")
        with pytest.raises(SandboxError, match=r"cannot be copied: cp: .*No space left"):
            await session.fork()
        assert await shown(session, "import os\nos.path.getsize('big')") == "700000\n"


async def test_what_runs_can_be_ended_and_the_files_kept(session: Session) -> None:
    await session.run("x = 1\nopen('kept.txt', 'w').write('1')")
    master, slave = pty.openpty()
    try:
        process = await session.spawn(["sleep", "60"], streams=(slave, slave, slave))
        assert session.whole()
        await session.end_programs()
        assert not process.running
        assert "NameError" in await shown(session, "x"), "a fresh interpreter"
        assert await session.read_file("kept.txt") == b"1"
        await session.end_programs()
        await session.end_programs()
        assert (await session.exec("cat kept.txt; mv /box/tmp /box/t")).stdout == "1"
        assert not session.whole()
    finally:
        os.close(master)
        os.close(slave)


async def test_files_from_outside(session: Session) -> None:
    await session.write_file("new/deep/b.bin", b"\0\xff")
    await session.write_file("/tmp/c.txt", b"c")
    cell = "open('new/deep/b.bin', 'ab').write(b'!')\nopen('new/deep/d', 'w')\nopen('/tmp/c.txt').read()"
    assert await shown(session, cell) == "'c'\n"
    assert await session.read_file("/box/work/new/deep/b.bin") == b"\0\xff!"


async def test_folders_go_in_and_out(session: Session, tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "sub").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "sub" / "data").write_bytes(bytes(3000))
    await session.upload(source, "task")
    await session.upload(source / "sub" / "data", "one")
    assert (await session.exec("./task/run.sh; cat task/sub/data one | wc -c")).stdout == "ran\n6000\n"
    await session.download("task", tmp_path / "out")
    await session.download("one", tmp_path / "one")
    assert (tmp_path / "out" / "sub" / "data").read_bytes() == (tmp_path / "one").read_bytes() == bytes(3000)
    with pytest.raises(FileNotFoundError):
        await session.download("nowhere", tmp_path / "x")
    await session.exec("mkfifo task/pipe")
    with pytest.raises(OSError, match="neither file nor folder"):
        await session.download("task", tmp_path / "y")


async def test_limits_hold_for_the_whole_session(pool: SandboxPool) -> None:
    limits = SessionLimits(disk_bytes=1 << 20, processes=6, output_bytes=300, total_wall_seconds=30, wall_seconds=5)
    async with pool.session(limits=limits) as session:
        await session.run("open('a', 'wb').write(bytes(700_000))")
        assert "No space left" in (await session.exec("head -c 700000 /dev/zero > b; rm b")).stderr
        assert "No space left" in (await session.run("open('c', 'wb').write(bytes(700_000))")).stderr
        many = "for i in 1 2 3 4 5 6 7; do sleep 5 & done"
        flood = await session.run(f"print('x' * 1000)\nimport subprocess\nsubprocess.run('{many}', shell=True)")
        assert flood.stdout_truncated
        assert len(flood.stdout_raw) == 300
        assert "fork" in flood.stderr
        hungry = await session.run("b = bytearray(4 << 30)")
        assert (hungry.stderr.splitlines()[-1], hungry.state) == ("MemoryError", "kept")
        session._wall = 30.0
        late = await session.run("open('ran', 'w')")
        assert (late.limit_hit, late.state, late.exit_code) == ("total_wall_seconds", "kept", None)
        assert (await session.exec("true")).limit_hit == "total_wall_seconds"
        with pytest.raises(FileNotFoundError):
            await session.read_file("ran")


@needs_groups
async def test_a_cell_that_leaves_no_memory_for_the_next_is_undone(pool: SandboxPool) -> None:
    fill = "x = []\ntry:\n    while True: x.append(bytearray(1 << 20))\nexcept MemoryError: del x[-{freed}:]"
    async with pool.session(limits=SessionLimits(memory_bytes=256 << 20)) as session:
        full = await session.run(fill.format(freed=2))
        assert (full.state, full.limit_hit) == ("rolled_back", None)
        assert full.stderr == "The cell was rolled back: it left no memory for the next one.\n"
        assert (await session.run(fill.format(freed=16))).state == "kept"
        assert await shown(session, "len(x) > 50") == "True\n"
        objects = "y = []\ntry:\n    while True: y.append([1] * 10)\nexcept MemoryError: pass"
        no_object = await session.run(objects)
        assert (no_object.state, no_object.stderr) == (full.state, full.stderr)
        assert await shown(session, "len(x) > 50") == "True\n"


async def test_memory_and_cpu_time_are_counted_over_all_processes_and_calls(pool: SandboxPool) -> None:
    limits = SessionLimits(wall_seconds=20, memory_bytes=256 << 20, cpu_seconds=2.0)
    async with pool.session(limits=limits) as session:
        await session.run("x = bytearray(50 << 20)")
        hoard = (
            "import os, time\nfor _ in range(8):\n    if os.fork() == 0: y = bytearray(90 << 20); time.sleep(30)\n"
            "time.sleep(30)"
        )
        result = await session.run(hoard)
        assert (result.limit_hit, result.state) == ("memory_bytes", "rolled_back")
        assert await shown(session, "len(x)") == f"{50 << 20}\n"
        spin = await session.exec("while :; do :; done & while :; do :; done")
        assert (spin.limit_hit, spin.timed_out) == ("cpu_seconds", True)
        assert (await session.run("1")).limit_hit == "cpu_seconds"


async def test_a_cancelled_call_is_undone(session: Session) -> None:
    await session.run("x = 1")
    call = asyncio.create_task(session.run("x = 2\nimport time; time.sleep(30)"))
    command = asyncio.create_task(session.exec("sleep 30"))
    await asyncio.sleep(0.3)
    for task in (call, command):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await shown(session, "x") == "1\n"


async def test_the_policy_holds_in_every_cell() -> None:
    policy = Policy(allowed_modules=("math",), restricted_functions=("open",))
    async with SandboxPool(workers=1, warm_modules=(), policy=policy) as pool, pool.session() as session:
        for _ in range(2):
            assert "ImportError: module 'os' is not allowed" in (await session.run("import os")).stderr
            assert "PermissionError: open is not allowed" in (await session.run("open('x', 'w')")).stderr
        assert (await session.run("import math\n1 / 0")).stderr.endswith("ZeroDivisionError: division by zero\n")


async def test_refused_arguments(pool: SandboxPool) -> None:
    with pytest.raises(ConfigError, match="plain path"):
        pool.session(files={"../x": b""})
    with pytest.raises(ConfigError, match="disk_bytes"):
        pool.session(files={"x": bytes(1 << 20)}, limits=SessionLimits(disk_bytes=1 << 16))
    with pytest.raises(ConfigError, match="idle_seconds"):
        SessionLimits(idle_seconds=0)
    assert pool.session().limits.memory_bytes == Limits().memory_bytes


async def is_there(session: Session, path: str) -> bool:
    try:
        await session.read_file(path)
    except FileNotFoundError:
        return False
    return True


async def test_a_cell_for_which_no_process_is_left_is_not_run_and_loses_nothing(pool: SandboxPool) -> None:
    bomb = (
        "import os, time\ntry:\n    while os.fork(): pass\nexcept OSError:\n    open('full', 'w').close()\n"
        "os.close(0), time.sleep(100)"
    )
    async with pool.session(limits=SessionLimits(processes=6)) as session:
        await session.run("x = [1]")
        null = os.open(os.devnull, os.O_RDWR)
        program = await session.spawn(["python3", "-c", bomb], streams=(null, null, null))
        os.close(null)
        # No program is asked: the place that one leaves is room for a cell.
        while not await is_there(session, "full"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        refused = await session.run("x.append(2)")
        assert (refused.state, refused.exit_code, refused.limit_hit) == ("rolled_back", 1, None)
        assert "was not run" in refused.output
        late = await session.run("x.append(3)", wall_seconds=0.1)
        assert (late.state, late.limit_hit) == ("rolled_back", "wall_seconds")
        program.kill()
        await program.wait()
        assert await shown(session, "x") == "[1]\n"
