"""Containers by the stand-in for docker, and by docker and podman where they are."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from containers import REAL_IMAGE, real, stand_in
from toy_tools import until

from verl_tool.errors import ConfigError, SandboxError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sandbox.backends import Container, ContainerSettings
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
    with pytest.raises(OSError, match="more than 8388608 bytes"):
        await container.read_file("/dev/zero")
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


async def test_what_it_is_started_with(alone: ContainerSettings, tmp_path: Path) -> None:
    async with Container(alone, LIMITS) as container:
        container.engine._path = str(tmp_path / "gone")
        with pytest.raises(SandboxError, match="docker cannot be run"):
            await container.exec("true")
        container.engine._path = str(tmp_path / "bin" / "docker")
        options = json.loads((tmp_path / "containers" / container.name / "options.json").read_text())
    assert options["--network"] == ["none"]
    assert (options["--memory"], options["--memory-swap"]) == ([str(2 << 30)], [str(2 << 30)])
    assert (options["--pids-limit"], options["--cpus"]) == (["28"], ["1"])
    assert {"--rm", "--read-only", "--init"} < set(options)
    assert options["--cap-drop"] == ["ALL"]
    assert containers(tmp_path) == []


async def test_what_cannot_be_started_says_why(alone: ContainerSettings, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="docker run failed: Unable to find image 'missing"):
        await Container(ContainerSettings("docker", "missing"), LIMITS).start()
    with pytest.raises(ConfigError, match="no program 'dokker' on PATH"):
        Container(ContainerSettings("dokker", "any"), LIMITS)
    with pytest.raises(ConfigError, match="image is ''"):
        ContainerSettings("docker", "")
    async with Container(ContainerSettings("docker", "no-python"), LIMITS) as container:
        with pytest.raises(SandboxError, match="no python3"):
            await container.run("1")
        with pytest.raises(SandboxError, match="cannot be forked"):
            await container.fork()
        assert (await container.exec("echo well")).stdout == "well\n"
    with pytest.raises(ToolFault, match="was stopped"):
        await container.exec("true")


@pytest.mark.parametrize("code", [1, 125, 126, 127, 255])
async def test_a_command_that_the_back_end_does_not_run_is_a_fault(
    alone: ContainerSettings, tmp_path: Path, code: int
) -> None:
    broken = tmp_path / "broken"
    broken.write_text(
        f'#!/bin/sh\ncase "$*" in *model*) echo "Error: OCI runtime error: no memory" >&2; exit {code} ;; esac\n'
        f'exec {tmp_path}/bin/docker "$@"\n'
    )
    broken.chmod(0o755)
    async with Container(alone, LIMITS) as container:
        container.engine._path = str(broken)
        with pytest.raises(SandboxError, match="exec did not run a command; it says 'Error: OCI runtime error"):
            await container.exec("echo model")
        # A program that says the same is none.
        said = await container.exec(f"echo Error: OCI runtime error: container >&2; exit {code}")
        assert (said.exit_code, said.stderr) == (code, "Error: OCI runtime error: container\n")


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
        await until(lambda: container._life is not None and container._life.returncode is not None)
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
