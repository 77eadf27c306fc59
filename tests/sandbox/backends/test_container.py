"""Containers by the stand-in for docker, and by docker and podman where they are."""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from containers import REAL_IMAGE, real, stand_in
from toy_tools import until

from verl_tool.errors import ConfigError, SandboxError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sandbox.backends import Container, ContainerSettings, resident_client
from verl_tool.sandbox.backends.inside import resident
from verl_tool.sandbox.limits import SessionLimits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LIMITS = SessionLimits(wall_seconds=30, output_bytes=2000, disk_bytes=8 << 20, processes=20, total_wall_seconds=100)


@pytest.fixture(params=["stand-in", "docker", "podman"])
def settings(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerSettings:
    if request.param == "stand-in":
        return ContainerSettings(stand_in(tmp_path, monkeypatch), "any")
    return ContainerSettings(real(request.param), REAL_IMAGE)


@pytest.fixture
async def container(settings: ContainerSettings) -> AsyncIterator[Container]:
    async with Container(settings, LIMITS) as container:
        yield container


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerSettings:
    """The stand-in only."""
    return ContainerSettings(stand_in(tmp_path, monkeypatch), "any")


def containers(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "containers"))


async def test_commands_and_files(container: Container) -> None:
    result = await container.exec("cat; echo err >&2; pwd; echo $X; exit 3", stdin="in\n", env={"X": "1 2"})
    assert (result.stdout, result.stderr, result.exit_code) == ("in\n/box/work\n1 2\n", "err\n", 3)
    assert (await container.exec(["printf", "%s", "a b"])).stdout == "a b"
    await container.write_file("new/deep/a.bin", b"\0\xff")
    assert await container.read_file("/box/work/new/deep/a.bin") == b"\0\xff"
    assert (await container.exec("ls", cwd="new/deep")).stdout == "a.bin\n"
    with pytest.raises(FileNotFoundError):
        await container.read_file("nowhere")
    with pytest.raises(IsADirectoryError):
        await container.read_file("new")
    with pytest.raises(OSError, match=r"Read-only|Permission"):
        await container.write_file("/usr/x", b"")
    with pytest.raises(OSError, match="Invalid argument"):
        await container.read_file("/dev/zero")
    await container.exec(["python3", "-c", "open('large', 'wb').truncate(9_000_000)"])
    await container.exec("ln -s /proc/self/fd/1 link; mkfifo pipe")
    with pytest.raises(OSError, match="more than 8388608 bytes") as caught:
        await container.read_file("large")
    assert caught.value.errno == errno.EFBIG
    for path in ("link", "pipe", "/proc/self/oom_score_adj", "/dev/null"):
        with pytest.raises(OSError, match=r"Invalid argument|No such device|Permission denied"):
            await container.write_file(path, b"1000")
    assert (await container.exec("echo well")).stdout == "well\n"
    long = await container.exec("head -c 5000 /dev/zero")
    assert (long.stdout_bytes, len(long.stdout_raw), long.stdout_truncated) == (5000, 2000, True)
    for command in (["no-such-program"], ["echo", "a\0b"], ["echo", "a" * 200_000]):
        assert (await container.exec(command)).exit_code in (1, 126, 127)
    # Podman passes arguments on as JSON, which holds no such character.
    lone = (await container.exec(["printf", "%s", "\ud800"])).stdout_raw
    assert lone in (b"\xed\xa0\x80", 3 * "\ufffd".encode())


async def test_it_knows_nothing_of_our_environment(
    settings: ContainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    async with Container(settings, LIMITS) as container:
        assert "hidden" not in (await container.exec("env; cat /proc/self/environ")).stdout


async def test_a_command_that_takes_too_long_is_ended_with_what_it_started(container: Container) -> None:
    for seconds in (1, 5, 25):  # a busy machine needs a while to get into the container
        result = await container.exec("sleep 333 & echo begun; sleep 334", wall_seconds=seconds)
        if result.stdout:
            break
    assert (result.limit_hit, result.timed_out, result.stdout) == ("wall_seconds", True, "begun\n")
    found = await container.exec("for f in /proc/[0-9]*; do tr '\\0' ' ' < $f/cmdline; echo; done 2>/dev/null")
    assert "sleep 33" not in found.stdout.replace("sleep 33[", "")
    call = asyncio.create_task(container.exec("touch began; sleep 335; touch ended"))
    await asyncio.sleep(0.5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await container.exec("ls")).ok


async def test_cells_share_state_and_one_that_does_not_end_is_undone(container: Container) -> None:
    async def shown(code: str, **more: object) -> str:
        result = await container.run(code, interactive=True, **more)  # type: ignore[arg-type]
        assert (result.state, result.exit_code) == ("kept", 0), result
        return result.stdout

    assert await shown("x = [1]\nimport asyncio\nx") == "[1]\n"
    assert await shown("await asyncio.sleep(0)\nopen('f', 'w').write('é')\ninput()", stdin="in\n") == "'in'\n"
    failed = await container.run("def f(): 1/0\nf()")
    assert (failed.state, failed.exit_code) == ("kept", 1)
    assert failed.stderr.splitlines()[1:3] == ['  File "<cell 3>", line 2, in <module>', "    f()"]
    late = await container.run("x.append(2)\nimport time\ntime.sleep(60)", wall_seconds=0.5)
    assert (late.state, late.limit_hit, late.timed_out) == ("rolled_back", "wall_seconds", True)
    gone = await container.run("x.append(3)\nimport os\nos._exit(7)")
    assert (gone.state, gone.exit_code) == ("rolled_back", 7)
    killed = await container.run("os.kill(os.getpid(), 9) if 'os' in globals() else __import__('os').abort()")
    assert (killed.state, killed.signal) == ("rolled_back", 6)
    assert await shown("x") == "[1]\n"
    threads = await container.run("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()")
    assert (threads.state, threads.ended_threads) == ("kept", 1)
    assert (await container.run("raise SystemExit(4)")).exit_code == 4
    flood = await container.run("print('x' * 5000)")
    assert (flood.stdout_bytes, len(flood.stdout_raw)) == (5001, 2000)
    await container.run("import os\ndef full(): os.fork = forks; raise BlockingIOError\nforks, os.fork = os.fork, full")
    refused = await container.run("x.append(4)")
    assert (refused.state, refused.exit_code, "was not run" in refused.stderr) == ("rolled_back", 1, True)
    assert await shown("x") == "[1]\n"
    lost = await container.run("import os\nos.kill(os.getppid(), 9)\nimport time; time.sleep(60)", wall_seconds=1)
    assert lost.state in ("lost", "rolled_back")
    assert (await container.run("1", interactive=True)).stdout == "1\n"
    call = asyncio.create_task(container.run("import time; time.sleep(60)"))
    await asyncio.sleep(0.3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await container.run("1")).state == "lost", "never a fresh state in silence"
    assert (await container.run("2", interactive=True)).stdout == "2\n"
    assert (await container.read_file("f")).decode() == "é"


async def test_files_and_folders_go_in_and_out(container: Container, tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "sub").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "sub" / "data").write_bytes(b"\0" * 3000)
    await container.upload(source, "task")
    await container.upload(source / "run.sh", "one.sh")
    assert (await container.exec("./task/run.sh; ./one.sh; wc -c < task/sub/data")).stdout == "ran\nran\n3000\n"
    await container.download("task", tmp_path / "out")
    assert (tmp_path / "out" / "sub" / "data").read_bytes() == b"\0" * 3000
    assert os.access(tmp_path / "out" / "run.sh", os.X_OK)
    await container.download("one.sh", tmp_path / "one")
    assert (tmp_path / "one").read_text() == "#!/bin/sh\necho ran\n"
    with pytest.raises(FileNotFoundError):
        await container.download("nowhere", tmp_path / "x")
    await container.exec("mkfifo task/pipe")
    with pytest.raises(OSError, match="neither file nor folder"):
        await container.download("task", tmp_path / "y")


async def test_both_streams_are_in_the_order_of_writing(container: Container) -> None:
    line = "for i in 1 2 3; do echo out$i; sleep 0.1; echo err$i >&2; sleep 0.1; done"
    result = await container.exec(line)
    assert result.output == "out1\nerr1\nout2\nerr2\nout3\nerr3\n"
    assert (result.stdout, result.stderr) == ("out1\nout2\nout3\n", "err1\nerr2\nerr3\n")


async def test_what_a_command_leaves_running_ends_with_it(container: Container) -> None:
    left = "setsid sleep 301 & (sleep 302 &) & env -i nohup sleep 303 >/dev/null 2>&1 & echo done"
    assert (await container.exec(left)).stdout == "done\n"
    assert "sleep" not in await command_lines(container)
    daemon = "import os, time\nos.fork() and os._exit(0)\nos.setsid()\nos.fork() and os._exit(0)\ntime.sleep(304)"
    await container.exec(["python3", "-c", daemon])
    assert "304" not in await command_lines(container)


async def command_lines(container: Container) -> str:
    return (await container.exec(["cat", "/proc/sys/kernel/ostype", *await _files(container, "cmdline")])).stdout


async def _files(container: Container, name: str) -> list[str]:
    line = f"for f in /proc/[0-9]*; do [ $f = /proc/$$ ] || echo $f/{name}; done"
    return (await container.exec(line)).stdout.split()


async def test_its_programs_cannot_harm_the_process_that_runs_them(container: Container) -> None:
    attacks = (
        "kill -9 -1; kill -9 $PPID; kill -STOP $PPID; kill -9 1",
        "for f in /proc/[0-9]*; do echo garbage > $f/fd/1; echo 1 > $f/oom_score_adj; cat $f/environ $f/maps; done",
        "python3 -c 'import ctypes, os; print(ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0))'",
        ":(){ :|:& };:; sleep 0.5",
        "ulimit -u 1; exec 0<&- 1>&- 2>&-; sleep 0.2",
        "printf '\\000\\000\\000\\002\\000\\000\\000\\000{}'",
    )
    for attack in attacks:
        await container.exec(attack, wall_seconds=10)
        assert (await container.exec("echo well")).stdout == "well\n", attack
    lines = (await container.exec("grep -h ^Cap /proc/self/status; id -u; cat /proc/self/status")).stdout.splitlines()
    assert all(line.split()[1] == "0" * 16 for line in lines[:3])
    assert lines[5] == "65534"
    assert "NoNewPrivs:\t1" in lines


CHAIN = """
import os, signal
keeper = os.getppid()
for _ in range(4):
    if os.fork() == 0:
        while True:
            try:
                os.kill(keeper, signal.SIGSTOP)
                open('stopped', 'w').close()
            except OSError:
                pass
            try:
                if os.fork():
                    os._exit(0)
            except OSError:
                pass
"""
"""Processes that follow each other faster than they are found, and stop who ends them where they may."""


async def test_processes_that_follow_each_other_cannot_stop_who_ends_them(
    settings: ContainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if none of them were found one by one.
    source = inspect.getsource(resident).replace("END_SECONDS = 2.0", "END_SECONDS = -1.0", 1)
    monkeypatch.setattr(resident_client, "_source", lambda: source)
    assert "END_SECONDS = -1.0" in source
    async with Container(settings, LIMITS) as container:
        for _ in range(2):
            await container.exec(["python3", "-c", CHAIN], wall_seconds=10)
            assert (await container.exec("echo well; ls")).stdout == "well\n"
            await container.spawn_inside(["python3", "-c", CHAIN])
            await asyncio.sleep(0.5)
            await container.end_programs()
            assert (await container.exec("ls; cat /proc/[0-9]*/cmdline | grep -c 'keepe[r] ='")).stdout == "0\n"


async def test_programs_may_open_their_streams_anew(container: Container) -> None:
    line = "cat /dev/stdin > /dev/stdout; echo err > /dev/stderr"
    result = await container.exec(line, stdin="in\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("in\n", "err\n", 0)
    program = await container.spawn_inside(["sh", "-c", "echo out > /proc/self/fd/1"])
    assert await asyncio.wait_for(program.stdout.read(), 10) == b"out\n"


async def test_a_program_whose_output_nobody_takes_waits(container: Container) -> None:
    program = await container.spawn_inside(["sh", "-c", "yes; true"], {}, ".")
    await asyncio.sleep(0.5)
    assert len(program.stdout._buffer) < 1 << 20  # type: ignore[attr-defined]
    assert (await container.exec("echo meanwhile")).stdout == "meanwhile\n"
    assert await program.stdout.readexactly(4 << 20) == b"y\n" * (2 << 20)
    program.kill()
    assert await asyncio.wait_for(program.wait(), 10) == -9
    echo = await container.spawn_inside(["cat"], {}, ".")
    for size in (1, 100_000, 3_000_000):
        echo.stdin.write(b"x" * size)
        assert await asyncio.wait_for(echo.stdout.readexactly(size), 30) == b"x" * size
    echo.stdin.close()
    assert await asyncio.wait_for(echo.wait(), 10) == 0


async def test_all_programs_are_ended_and_files_stay(container: Container) -> None:
    await container.run("x = 1\nopen('kept', 'w').write('y')")
    program = await container.spawn_inside(["sleep", "305"], {}, ".")
    await container.end_programs()
    assert await asyncio.wait_for(program.wait(), 10) == -9
    assert "305" not in await command_lines(container)
    assert "NameError" in (await container.run("x")).stderr
    assert await container.read_file("kept") == b"y"


async def test_no_program_is_left_once_all_are_ended(container: Container) -> None:
    assert container._resident is not None
    for _ in range(10):
        await container.spawn_inside(["sleep", "306"])
        await container.end_programs()
        assert container._resident.programs == 0, "a fork would be rejected"


async def test_a_program_that_cannot_be_started_is_none_that_runs() -> None:
    async with Container(ContainerSettings(real("podman"), REAL_IMAGE), LIMITS) as container:
        starts = [container.spawn_inside(["sleep", "306"]) for _ in range(LIMITS.processes + 10)]
        results = await asyncio.gather(*starts, return_exceptions=True)
        assert any("no program can be started" in str(result) for result in results)
        await container.end_programs()
        assert container._resident is not None
        assert container._resident.programs == 0
        assert (await container.exec("echo well")).stdout == "well\n"


async def test_programs_find_no_descriptors_but_their_streams(container: Container) -> None:
    for _ in range(3):
        assert (await container.exec("ls /proc/self/fd")).stdout == "0\n1\n2\n3\n", "3 is the folder"
    large = "x" * 100_000
    assert (await container.exec(["bash", "-c", "echo ${#A}${#B}${#C}"], env=dict.fromkeys("ABC", large))).stdout == (
        "100000" * 3 + "\n"
    )


async def test_one_that_does_not_answer_is_lost(
    alone: ContainerSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("verl_tool.sandbox.backends.container._MARGIN_SECONDS", 0.5)
    async with Container(alone, LIMITS) as container:
        assert container._resident is not None
        post = container._resident.post
        monkeypatch.setattr(container._resident, "post", lambda header, payload=b"": None)
        with pytest.raises(ToolFault, match="no longer answers") as caught:
            await container.exec("true", wall_seconds=0.5)
        assert caught.value.kind is FaultKind.STATE_LOST
        monkeypatch.setattr(container._resident, "post", post)
        with pytest.raises(ToolFault, match="no longer answers"):
            await container.exec("true")
    assert containers(tmp_path) == []


async def test_memory_is_limited_for_all_programs_together() -> None:
    settings = ContainerSettings(real("podman"), REAL_IMAGE)
    limits = SessionLimits(memory_bytes=128 << 20, disk_bytes=8 << 20)
    async with Container(settings, limits) as container:
        eats = "import os\n[os.fork() for _ in range(2)]\nx = bytearray(200 << 20)"
        result = await container.exec(["python3", "-c", eats])
        assert (result.limit_hit, result.exit_code, result.signal) == ("memory_bytes", None, 9)
        assert (await container.exec("echo well")).stdout == "well\n"
    assert "oom" not in os.listdir()  # conmon writes it where podman runs


async def test_root_of_an_image_may_change_its_files_and_not_end_the_container() -> None:
    async with Container(ContainerSettings(real("podman"), REAL_IMAGE, writable=True), LIMITS) as container:
        result = await container.exec("id -u; echo $HOME; echo x >> /etc/passwd; chown 5:5 /etc/passwd")
        assert (result.stdout, result.stderr) == ("0\n/root\n", "")
        assert (await container.exec("stat -c %u:%g /etc/passwd")).stdout == "5:5\n"
        await container.exec("ln -s /proc/self/fd/1 out; ln -s /proc/self/fd/0 in", cwd="/srv")
        for path in ("/srv/out", "/srv/in", "/proc/self/oom_score_adj"):
            with pytest.raises(OSError, match="Invalid argument"):
                await container.write_file(path, b"1000")
        await container.write_file("/etc/new", b"n")
        assert await container.read_file("/etc/new") == b"n"


BECOME = """
import os, resource, signal, socket, time
def become(user): os.setgroups([]); os.setresgid(*[user] * 3); os.setresuid(*[user] * 3)
RESIDENT = int(next(line for line in open("/proc/1/status") if line.startswith("Uid")).split()[1])
"""
RUNAWAY = """
become(33)
while True:
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
    elif time.monotonic() % 1 < 0.5: os._exit(0)
"""
ATTACKS_OF_ROOT = {
    "signals to the first process": "for number in set(range(1, 65)) - {32, 33}: os.kill(1, number)",
    "the end of all": "os.kill(-1, signal.SIGKILL)",
    "the end of its keeper": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(1)",
    "a keeper that is stopped": "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(100)",
    "all keepers that are stopped": "become(RESIDENT); os.kill(-1, signal.SIGSTOP); time.sleep(100)",
    "processes of other users": "os.fork() or (os.setsid(), os.fork() or (become(33), time.sleep(100)))",
    "a user whose processes run away": RUNAWAY,
    "limits of the first process": """
become(RESIDENT)
for number in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
    try: resource.prlimit(1, number, (0, 0))
    except PermissionError: print('refused')
try: open('/proc/1/mem', 'r+b')
except PermissionError: print('refused')
""",
}


async def test_a_working_folder_that_the_image_does_not_have_is_made() -> None:
    settings = ContainerSettings(real("podman"), REAL_IMAGE, writable=True, workdir="/srv/a/b")
    async with Container(settings, LIMITS) as container:
        assert (await container.exec("pwd; stat -c %u:%a .")).stdout == "/srv/a/b\n0:755\n"


async def test_root_of_an_image_may_become_others_and_listen_to_any_port() -> None:
    async with Container(ContainerSettings(real("podman"), REAL_IMAGE, writable=True), LIMITS) as container:
        code = "socket.create_server(('127.0.0.1', 80)); become(33); print(os.getuid()); os.setuid(0)"
        result = await container.exec(["python3", "-c", BECOME + code])
        assert (result.stdout, "Operation not permitted" in result.stderr) == ("33\n", True)
        assert (await container.exec("grep CapEff /proc/self/status")).stdout == "CapEff:\t00000000000404fb\n"


async def test_the_end_of_a_container_whose_programs_are_root_may_be_their_doing() -> None:
    users = set()
    for command, kind in (("", FaultKind.STATE_LOST), ("grep ^Uid /proc/1/status", FaultKind.TOOL_CRASHED)):
        async with Container(ContainerSettings(real("podman"), REAL_IMAGE, writable=True), LIMITS) as container:
            if command:
                users.add((await container.exec(command)).stdout)
            await container.provider.remove(container.name)
            await until(lambda container=container: not container.alive)
            with pytest.raises(ToolFault) as caught:
                await container.exec("true")
            assert caught.value.kind is kind
    async with Container(ContainerSettings(real("podman"), REAL_IMAGE, writable=True), LIMITS) as container:
        users.add((await container.exec("grep ^Uid /proc/1/status")).stdout)
    assert len(users) == 2, "each has a user of its own"


async def test_what_root_of_an_image_does_to_other_processes_ends_with_it() -> None:
    settings = ContainerSettings(real("podman"), REAL_IMAGE, writable=True)
    async with Container(settings, replace(LIMITS, processes=200)) as container:
        await container.run("x = 5")
        for name, attack in ATTACKS_OF_ROOT.items():
            began = time.monotonic()
            result = await container.exec(["python3", "-c", BECOME + attack], wall_seconds=2)
            assert time.monotonic() - began < 15, name
            if "limits" in name:
                assert result.stdout == "refused\n" * 4
            for _ in range(3):
                assert (await container.exec("echo well")).stdout == "well\n", name
            listed = (await container.exec("cat /proc/[0-9]*/status | grep ^Uid")).stdout
            assert "\t33\t" not in listed, name
        states = [(await container.run(code)).state for code in ("x", "y = 1", "y")]
        assert states == ["lost", "kept", "kept"], "as after a cell that ends its own process"
        await container.exec(
            ["python3", "-c", f"{BECOME}os.fork() or (os.setsid(), become(33), time.sleep(100))"], wall_seconds=1
        )
        await container.end_programs()
        assert (await container.exec("echo well")).stdout == "well\n"


async def test_what_it_is_started_with(alone: ContainerSettings, tmp_path: Path) -> None:
    async with Container(alone, LIMITS) as container:
        options = json.loads((tmp_path / "containers" / container.name / "options.json").read_text())
    assert options["--network"] == ["none"]
    assert (options["--memory"], options["--memory-swap"]) == ([str(2 << 30)], [str(2 << 30)])
    assert (options["--pids-limit"], options["--cpus"]) == (["28"], ["1"])
    assert {"--rm", "--read-only"} < set(options)
    assert (options["--cap-drop"], options["--cap-add"]) == (["ALL"], ["SETUID", "SETGID", "KILL", "CHOWN"])
    assert options["--security-opt"] == ["no-new-privileges"]
    assert containers(tmp_path) == []
    gone = Container(alone, LIMITS)
    gone.provider.engine._path = str(tmp_path / "gone")
    with pytest.raises(SandboxError, match="docker cannot be run"):
        await gone.start()


async def test_what_cannot_be_started_says_why(alone: ContainerSettings, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"no image missing and cannot pull it: .*access denied"):
        await Container(ContainerSettings("docker", "missing"), LIMITS).start()
    with pytest.raises(SandboxError, match="docker run failed: Error: OCI runtime error: no memory; image: broken"):
        await Container(ContainerSettings("docker", "broken"), LIMITS).start()
    with pytest.raises(ConfigError, match="no program 'dokker' on PATH"):
        Container(ContainerSettings("dokker", "any"), LIMITS)
    with pytest.raises(ConfigError, match="image is ''"):
        ContainerSettings("docker", "")
    async with Container(ContainerSettings("docker", "no-python"), LIMITS) as container:
        with pytest.raises(SandboxError, match="no python3"):
            await container.run("1")
        with pytest.raises(ToolFault, match="no python3") as caught:
            await container.run("1")
        assert caught.value.kind is FaultKind.TOOL_CRASHED, "a command may have removed it"
        assert (await container.exec("echo well")).stdout == "well\n"
    with pytest.raises(ToolFault, match="was stopped"):
        await container.exec("true")


async def test_cells_of_a_python_that_runs_none_are_a_fault(
    alone: ContainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os; os.read(0, 4); os.kill(os.getpid(), 9)"
    async with Container(alone, LIMITS) as container:
        with monkeypatch.context() as patch:
            patch.setattr("verl_tool.sandbox.backends.cells._source", lambda: source)
            with pytest.raises(SandboxError, match="does not run cells"):
                await container.run("1")
        lost = await container.run("import os, signal; os.kill(os.getppid(), signal.SIGKILL); os.kill(0, 9)")
        assert lost.state != "kept"


async def test_containers_say_how_many_processes_their_user_may_have(alone: ContainerSettings, tmp_path: Path) -> None:
    async with Container(alone, LIMITS) as container:
        options = json.loads((tmp_path / "containers" / container.name / "options.json").read_text())
    assert [word.partition("=")[0] for word in options["--ulimit"]] == ["nofile", "nproc"]


async def test_one_that_has_ended_is_lost(alone: ContainerSettings) -> None:
    async with Container(alone, LIMITS) as container:
        await container.run("x = 1")
        await asyncio.to_thread(subprocess.run, ["docker", "rm", "--force", container.name], check=True, timeout=60)
        await until(lambda: container._resident is not None and not container._resident.alive)
        for call in (container.exec("true"), container.run("x"), container.read_file("f")):
            with pytest.raises(ToolFault) as caught:
                await call
            assert caught.value.kind is FaultKind.STATE_LOST


async def test_nothing_is_left_when_its_process_is_killed(alone: ContainerSettings, tmp_path: Path) -> None:
    program = (
        "import asyncio\nfrom verl_tool.sandbox.backends import Container, ContainerSettings\n"
        "from verl_tool.sandbox.limits import SessionLimits\n"
        "async def main():\n"
        "    await Container(ContainerSettings('docker', 'any'), SessionLimits()).start()\n"
        "    print('started', flush=True)\n    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    for number in (signal.SIGKILL, signal.SIGINT):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"started\n"
        assert len(containers(tmp_path)) == 1
        process.send_signal(number)
        await asyncio.wait_for(process.wait(), 30)
        await until(lambda: containers(tmp_path) == [], seconds=30)
