"""Memory and CPU time of a run, counted by the kernel; what is left when runs are killed for others; long runs."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from verl_tool.errors import ConfigError, SandboxError
from verl_tool.sandbox import Limits, SandboxPool, oom_kills
from verl_tool.sandbox import pool as pools
from verl_tool.sandbox.isolation import cgroup, seccomp
from verl_tool.sandbox.isolation.cgroup import ControlGroup, RunGroup
from verl_tool.sandbox.job import JobFiles
from verl_tool.sandbox.run_queue import RunSlots
from verl_tool.sandbox.worker import RunStatus, Worker, WorkerExitedError

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
needs_groups = pytest.mark.skipif(
    not any(os.access(f"/sys/fs/cgroup/{place}cgroup.procs", os.W_OK) for place in ("", "memory/")),
    reason="control groups cannot be made here",
)
_ENDED = RunStatus(True, True, None, 9, 1.0, 0.1, 50 << 20, -1)

HOARDS = {
    "threads without their leader": (
        "import os, threading, ctypes, time, mmap\n"
        "def eat():\n"
        "    m = mmap.mmap(-1, 100 << 20, flags=34)\n"
        "    for _ in range(100): m.write(bytes(1 << 20))\n"
        "    time.sleep(30)\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n        threading.Thread(target=eat).start()\n"
        "        ctypes.CDLL(None).syscall(60, 0)\n"
        "time.sleep(30)\n"
    ),
    "buffers of sockets": (
        "import socket, time\ns = []\n"
        "while True:\n"
        "    a, b = socket.socketpair()\n"
        "    for x in (a, b):\n"
        "        x.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20); x.setblocking(False)\n"
        "        try:\n            while True: x.send(bytes(1 << 16))\n        except BlockingIOError: pass\n"
        "    s += [a, b]\n"
        "    if len(s) > 200:\n"
        "        import os\n        os.fork() or s.clear()\n"
    ),
    "shared mappings": (
        "import mmap, os, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        m = mmap.mmap(-1, 100 << 20)\n"
        "        for _ in range(100): m.write(bytes(1 << 20))\n"
        "        time.sleep(30)\n"
        "time.sleep(30)\n"
    ),
    "short lives": (
        "import os, time\n"
        "while True:\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(120 << 20); os.fork(); time.sleep(0.5); os._exit(0)\n"
        "    time.sleep(0.02)\n"
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(workers=1, warm_modules=()) as pool:
        yield pool


@needs_groups
@pytest.mark.parametrize("name", HOARDS)
async def test_memory_is_counted_wherever_it_is(pool: SandboxPool, name: str) -> None:
    result = await pool.run(HOARDS[name], limits=Limits(wall_seconds=30, memory_bytes=256 << 20))
    assert result.limit_hit == "memory_bytes"
    assert pool.stats().restarts == 0


_BURN = "t = time.process_time()\n{0}while time.process_time() - t < 0.02: pass\n{0}os._exit(0)\n"
EVASIONS = {
    "children that nobody waits for": (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "while True:\n    if os.fork() == 0:\n        " + _BURN.format(" " * 8) + "    try: os.wait()\n"
        "    except OSError: pass\n"
    ),
    "grandchildren": (
        "import os, time\n"
        "while True:\n    p = os.fork()\n    if p == 0:\n        if os.fork(): os._exit(0)\n        "
        + _BURN.format(" " * 8)
        + "    os.waitpid(p, 0); time.sleep(0.05)\n"
    ),
    "threads that end": (
        "import threading, time\ndef f():\n    t = time.thread_time()\n    while time.thread_time() - t < 0.02: pass\n"
        "while True:\n    t = threading.Thread(target=f); t.start(); t.join()\n"
    ),
    "programs": "import subprocess\nwhile True: subprocess.run(['/bin/sh', '-c', 'for i in 1 2 3; do :; done'])\n",
}


@needs_groups
@pytest.mark.parametrize("name", EVASIONS)
async def test_all_cpu_time_counts(pool: SandboxPool, name: str) -> None:
    limits = Limits(wall_seconds=60, cpu_seconds=0.4, processes=128)
    result = await pool.run(EVASIONS[name], limits=limits)
    assert result.limit_hit == "cpu_seconds", result.stderr
    assert result.cpu_seconds >= 0.4


@needs_groups
async def test_groups_are_used_again_and_removed() -> None:
    async with SandboxPool(workers=1, warm_modules=()) as pool:
        assert pool._group is not None
        for _ in range(5):
            shown = await pool.run("print(open('/proc/self/cgroup').read())")
            assert (name := re.search(r"verl-tool-\S+", shown.stdout)), shown
            assert cgroup._NAME.match(name[0]), "it tells more than it should"
        assert len(pool._group._made) == 1
        await asyncio.gather(*(pool.run("import time; time.sleep(0.3)") for _ in range(4)))
        assert len(pool._group._made) == 4
        folders = {folder for group in pool._group._made for folder in group._folders} | {*pool._group._folders}
        assert _there(folders) == folders
    assert not _there(folders)


async def test_only_groups_of_the_dead_are_removed(tmp_path: Path) -> None:
    other = await asyncio.create_subprocess_exec("sleep", "60")
    names = {}
    for pid, salt in ((os.getpid(), "a" * 12), (other.pid, "b" * 12)):
        names[pid] = f"verl-tool-{cgroup._mark(cgroup._started(pid), salt)}-{salt}"
    for folder in (f"{names[os.getpid()]}/0", f"{names[other.pid]}/0", f"{names[other.pid]}17", "verl-tool-of-others"):
        (tmp_path / folder).mkdir(parents=True)
    cgroup._remove_orphans(str(tmp_path))
    assert len(os.listdir(tmp_path)) == 4
    other.kill()
    await other.wait()
    cgroup._remove_orphans(str(tmp_path))
    assert set(os.listdir(tmp_path)) == {names[os.getpid()], "verl-tool-of-others"}


@needs_groups
async def test_a_group_that_cannot_be_made_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ControlGroup.create(1 << 30)
    assert groups is not None
    held, open_files = groups.take(100 << 20), _open_files()

    def fails(group: RunGroup) -> int:
        raise OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(RunGroup, "_cpu_used", fails)
        with pytest.raises(OSError, match="too many open files"):
            groups.take(100 << 20)
    assert _open_files() == open_files
    assert groups.take(100 << 20) is not held
    groups.remove()


@needs_groups
async def test_groups_that_are_not_used_again_hold_no_files_open() -> None:
    groups = ControlGroup.create(1 << 30)
    assert groups is not None
    removed, left = groups.take(100 << 20), groups.take(100 << 20)
    before = _open_files()
    groups.give(left, gone=False)
    groups.give(removed)
    for folder in removed._folders:
        os.rmdir(folder)
    fresh = groups.take(100 << 20)
    assert fresh not in (removed, left)
    assert _open_files() < before
    groups.remove()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@needs_groups
async def test_a_run_that_no_forkserver_takes_gives_its_group_back(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, begin, taken = pool._group, Worker.begin, []

    def begins_later(worker: Worker, job: JobFiles, limits: Limits, fetch: bool, group: RunGroup) -> object:
        taken.append(group)
        if len(taken) == 1:
            raise WorkerExitedError("a forkserver takes no more runs", retryable=True)
        return begin(worker, job, limits, fetch, group)

    monkeypatch.setattr(Worker, "begin", begins_later)
    assert (await pool.run("print(1)")).stdout == "1\n"
    assert groups is not None
    assert taken[0] in groups._free
    assert taken[0] is taken[1]


def _there(folders: set[str]) -> set[str]:
    return {folder for folder in folders if Path(folder).is_dir()}


@needs_groups
async def test_a_hog_dies_for_the_pools_memory_and_its_neighbours_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run within its own limit that takes all that the pool may have has itself to blame."""
    monkeypatch.setattr(pools, "_memory_ceiling", lambda: 400 << 20)
    async with SandboxPool(workers=1, warm_modules=()) as pool:
        code = "import time\nb = bytearray(10 << 20)\nfor _ in range(20): time.sleep(0.1)\nprint('fine')"
        neighbours = [asyncio.create_task(pool.run(code, limits=Limits(wall_seconds=60))) for _ in range(4)]
        hogs = [
            asyncio.create_task(pool.run("x = bytearray(600 << 20)\nprint('got it')", limits=Limits(wall_seconds=60)))
            for _ in range(2)
        ]
        assert [(await hog).limit_hit for hog in hogs] == ["memory_bytes"] * 2
        assert [(await run).stdout for run in neighbours] == ["fine\n"] * 4
        assert pool.stats().restarts == 0


@needs_groups
async def test_who_is_killed_for_others_runs_again_and_at_last_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_memory_ceiling", lambda: 200 << 20)
    async with SandboxPool(workers=1, warm_modules=()) as pool:
        pool._fair_share = 1 << 40  # whoever is killed has taken less than this
        begun = 0
        begin = Worker.begin

        def counted(*args: object) -> object:
            nonlocal begun
            begun += 1
            return begin(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(Worker, "begin", counted)
        with pytest.raises(SandboxError, match="memory that others had taken"):
            await pool.run("x = bytearray(400 << 20)")
        assert begun == 3


@needs_groups
async def test_whose_memory_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ControlGroup.create(1 << 30)
    assert group is not None
    mine = group.take(100 << 20)
    assert oom_kills.judge_by_group(_ENDED, mine, 1 << 30).limit_hit is None  # a signal that it sent to itself
    monkeypatch.setattr(RunGroup, "lost_process", lambda _: True)
    with pytest.raises(oom_kills.CollateralOomError):
        oom_kills.judge_by_group(_ENDED, mine, 1 << 30)
    assert oom_kills.judge_by_group(_ENDED, mine, 10 << 20).limit_hit == "memory_bytes"
    monkeypatch.setattr(RunGroup, "exceeded_memory", lambda _: True)
    assert oom_kills.judge_by_group(_ENDED, mine, 1 << 30).limit_hit == "memory_bytes"
    group.remove()


async def test_whose_memory_it_was_without_groups() -> None:
    kills = oom_kills.machine_kills()
    assert oom_kills.judge_without_group(_ENDED, kills, 1 << 30).limit_hit is None
    with pytest.raises(oom_kills.CollateralOomError):
        oom_kills.judge_without_group(_ENDED, kills - 1, 1 << 30)
    assert oom_kills.judge_without_group(_ENDED, kills - 1, 10 << 20).limit_hit == "memory_bytes"
    assert oom_kills.judge_without_group(replace(_ENDED, status=0), kills - 1, 1 << 30).limit_hit is None


async def test_a_run_that_will_not_go_away_is_answered_for_and_costs_its_neighbours_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child that the run made its forkserver's keeps the run's pid namespace from ending."""
    monkeypatch.setattr(seccomp, "_CLONE_PARENT", seccomp._CLONE_PTRACE)
    code = (
        "import ctypes, os\nif ctypes.CDLL(None).syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0: os._exit(0)\n"
        "print('made', flush=True)\n"
    )
    async with SandboxPool(workers=1, warm_modules=()) as pool:
        neighbour = asyncio.create_task(pool.run("import time; time.sleep(9); print('n')"))
        for ending in ("", "while True: pass"):
            begun = time.monotonic()
            result = await pool.run(code + ending, limits=Limits(wall_seconds=1))
            assert result.stdout == "made\n"
            assert time.monotonic() - begun < 12
            assert result.timed_out is bool(ending)
        assert (await neighbour).stdout == "n\n"
        assert pool.stats().restarts == 0
        assert (await pool.run("print(1)")).ok


async def test_a_run_that_breaks_every_forkserver_is_an_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours that die with it are run again; at last it is alone."""
    begin = Worker.begin

    def breaking(worker: Worker, job: JobFiles, *args: object) -> object:
        run = begin(worker, job, *args)  # type: ignore[arg-type]
        if b"break" in os.pread(job.fds[0], 1 << 17, 0):
            asyncio.get_running_loop().call_later(0.3, worker.abandon)
        return run

    monkeypatch.setattr(Worker, "begin", breaking)
    async with SandboxPool(workers=1, warm_modules=()) as pool:
        bad = asyncio.create_task(pool.run("print('break', flush=True)\nimport time; time.sleep(60)"))
        good = [asyncio.create_task(pool.run("import time; time.sleep(0.5); print('good')")) for _ in range(4)]
        result = await bad
        assert (result.limit_hit, result.stdout, result.ok) == ("sandbox", "break\n", False)
        assert [(await run).stdout for run in good] == ["good\n"] * 4
        assert pool.stats().restarts <= 2


async def test_long_runs_leave_their_places_to_short_ones(pool: SandboxPool) -> None:
    hogs = [asyncio.create_task(pool.run("while True: pass", limits=Limits(wall_seconds=6))) for _ in range(10)]
    await asyncio.sleep(2)
    assert (await pool.run("print(1)", limits=Limits(wall_seconds=20))).stdout == "1\n"
    assert any(not hog.done() for hog in hogs)
    assert [(await hog).limit_hit for hog in hogs] == ["wall_seconds"] * 10


async def test_places_are_given_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_tool.sandbox.run_queue.SHORT_SECONDS", 0.05)
    slots = RunSlots(short=2, maximum=3, max_queued=2)
    first, second = await slots.enter(), await slots.enter()
    third, fourth = asyncio.create_task(slots.enter()), asyncio.create_task(slots.enter())
    await asyncio.sleep(0)
    assert slots.queued == 2
    with pytest.raises(SandboxError, match="queue is full"):
        await slots.enter()
    place = await asyncio.wait_for(third, 5)  # the first two have grown old
    assert (slots.live, slots.queued) == (3, 1)
    slots.leave(first)
    slots.leave(await asyncio.wait_for(fourth, 5))
    for each in (second, place):
        slots.leave(each)
    assert slots.live == 0


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": b"", "a/b": b""}, "needs a folder where the file 'a'"),
        ({"main.py/x": b""}, "needs a folder where the file 'main.py'"),
        ({"x" * 300: b""}, "too long"),
        ({"/".join("d" * 200 for _ in range(20)): b""}, "too long"),
        ({"\udc80": b""}, "UTF-8"),
        ({f"f{i}": b"" for i in range(5000)}, "cannot be laid out"),
        ({f"f{i}": b"x" for i in range(4000)}, "cannot be laid out"),
    ],
)
async def test_files_that_cannot_be_laid_out_are_the_callers_error(
    pool: SandboxPool, files: dict[str, bytes], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await pool.run("", files=files, limits=Limits(disk_bytes=8 << 20))
