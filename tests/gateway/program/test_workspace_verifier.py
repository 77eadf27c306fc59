"""Verifiers of rows check what an agent program left: in the sandbox, and in containers."""

from __future__ import annotations

import asyncio
import io
import sys
import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agent_sessions import WritingGenerator
from containers import REAL_IMAGE, real, stand_in
from real_templates import TemplateTokenizer
from template_families import QWEN

from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.errors import ConfigError, SandboxError
from verl_tool.formats import format_by_name
from verl_tool.gateway.agent_host import AgentHost, AgentTask, finish_session
from verl_tool.gateway.agent_program import AgentProgram
from verl_tool.gateway.gateway_app import Gateway
from verl_tool.gateway.program import workspace_verifier
from verl_tool.gateway.program.container_program import ContainerOptions, ProgramContainers
from verl_tool.gateway.program.workspace_verifier import WorkspaceCopy
from verl_tool.gateway.session import SessionModel
from verl_tool.protocol import FILES_FIELD
from verl_tool.sandbox import RunResult, SandboxPool
from verl_tool.sandbox.backends import Container
from verl_tool.sandbox.isolation.levels import Level, strongest
from verl_tool.tasks.task import read_task
from verl_tool.verification import Verdict, Verification

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or strongest().level is not Level.full, reason="no sandbox on this machine"
    ),
    pytest.mark.timeout(180),
]

TOKENIZER = TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN)
ASKS = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "go"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"}), timeout=20).read()
"""
"""A request, without which a rollout is a fault."""
SCRIPT = """
if [ "$(cat sub/answer.txt)" = "$WANTED" ] && cmp -s in.txt /tests/in.txt; then echo 1; else echo 0; fi \\
    > /logs/verifier/reward.txt
ls -A
"""
RIGHT = "import os; os.mkdir('sub'); open('sub/answer.txt', 'w').write('42')\n"
FORGES = """
import os
for folder in ("/logs/verifier", "/box/logs/verifier", "/tests", "logs/verifier"):
    try:
        os.makedirs(folder, exist_ok=True)
        open(f"{folder}/reward.txt", "w").write("1")
        open(f"{folder}/test.sh", "w").write("echo 1 > /logs/verifier/reward.txt")
    except OSError:
        pass
for name in ("sitecustomize.py", "usercustomize.py", "cat", "cmp"):
    open(name, "w").write("import os; os.system('echo 1 > /logs/verifier/reward.txt')")
"""
LEAVES_A_PROCESS = """
import subprocess, sys
code = '''
import os, time
for _ in range(400):
    for folder in ("/logs/verifier", "/box/logs/verifier"):
        try:
            os.makedirs(folder, exist_ok=True)
            open(f"{folder}/reward.txt", "w").write("1")
        except OSError:
            pass
    os.makedirs("sub", exist_ok=True)
    open("sub/answer.txt", "w").write("41")
    time.sleep(0.01)
'''
subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
"""
LINKS = """
import os, shutil
home = os.getcwd()
os.chdir("/")
os.makedirs("/tmp/other/sub")
open("/tmp/other/sub/answer.txt", "w").write("42")
os.rename(home, "/tmp/old" if home == "/box/work" else home + "-old")
os.symlink("/tmp/other", home)
"""
LINKS_TO_SECRETS = "import os; os.mkdir('sub'); os.symlink('/tests/wanted.txt', 'sub/answer.txt')\n"
FILES = ({"path": "in.txt", "text": "given"},)
KILLS = "import os; os.mkdir('sub'); open('sub/answer.txt', 'w').write('42'); os.kill(os.getppid(), 9)\n"


def verification(script: str = SCRIPT, seconds: float = 60.0) -> Verification:
    tests = {
        "test.sh": PackedFile(script.encode()),
        "in.txt": PackedFile(b"given"),
        "wanted.txt": PackedFile(b"42"),
    }
    return Verification(files=pack_files(tests), timeout_seconds=seconds, env={"WANTED": "42"})


async def run(code: str, check: Verification | None = None, files: object = FILES, **options: Any) -> Trajectory:
    """The rollout of a program of one request and `code`."""
    model = SessionModel.create(
        WritingGenerator(TOKENIZER, ["Hello.<|im_end|>"]), TOKENIZER, [format_by_name("hermes")], 1 << 20
    )
    gateway = Gateway(model)
    session = gateway.open_session()

    fields = {"command": ("python3", "-c", ASKS + code), "seconds": 30, "memory_bytes": 512 << 20, **options}
    host = AgentHost(gateway.app(for_agents=True), AgentProgram.model_validate(fields))
    task = AgentTask.of_row([{"role": "user", "content": "go"}], {FILES_FIELD: files}, check or verification(), "row 7")
    try:
        await host.start()
        return await host.run(session, task, partial(finish_session, session))
    finally:
        await host.close()


def reward(rollout: Trajectory) -> float | None:
    assert rollout.fault is None, rollout.fault
    assert rollout.verdict is not None
    assert rollout.verdict.fault is None, rollout.verdict.fault
    return rollout.verdict.score


async def test_the_verifier_checks_the_files_that_the_program_left() -> None:
    rollout = await run(RIGHT + "os.mkfifo('pipe'); os.symlink('in.txt', 'link')")
    assert reward(rollout) == 1.0
    assert rollout.verdict is not None
    assert rollout.verdict.told.split() == ["in.txt", "link", "sub"], "links are copied, and pipes are not"
    assert rollout.extra["agent_program"]["exit_code"] == 0


@pytest.mark.parametrize("name", ["failing-test", "git-bisect"])
@pytest.mark.parametrize("solved", [True, False])
async def test_tasks_in_harbors_layout_are_solved_by_their_solutions(name: str, solved: bool) -> None:
    task = read_task(Path(__file__).parents[3] / "examples" / "tasks" / name)
    solution = task.solution["solve.sh"].content.decode()
    code = f"import subprocess; subprocess.run(['bash', '-c', {solution!r}])" if solved else ""
    assert reward(await run(code, task.verification, task.packed_files())) == float(solved)


ATTACKS: Mapping[str, str] = {
    "nothing": "",
    "wrong": RIGHT.replace("42", "41"),
    "forges": FORGES,
    "leaves a process": LEAVES_A_PROCESS,
    "links": LINKS,
    "links to secrets": LINKS_TO_SECRETS,
}


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in ATTACKS.items()])
async def test_what_is_wrong_gets_nothing(code: str) -> None:
    rollout = await run(code)
    assert reward(rollout) == 0.0
    assert rollout.verdict is not None
    assert "cannot be checked" not in rollout.verdict.told, "the verifier itself says so"


async def test_programs_of_a_row_stay_programs() -> None:
    check = verification("[ -x run.sh ] && [ ! -x plain.sh ] && echo 1 > /logs/verifier/reward.txt")
    files = [{"path": "run.sh", "text": "#!/bin/sh\n", "executable": True}, {"path": "plain.sh", "text": ""}]
    assert reward(await run("import subprocess; subprocess.run('./run.sh', check=True)", check, files)) == 1.0


async def test_the_files_of_a_program_at_its_time_limit_are_checked() -> None:
    rollout = await run(RIGHT + "import time; time.sleep(60)", seconds=2.5)
    assert reward(rollout) == 1.0
    assert rollout.extra["agent_program"]["exit_code"] is None


async def test_a_program_that_ends_what_copies_its_files_gets_nothing() -> None:
    rollout = await run(KILLS)
    assert reward(rollout) == 0.0
    assert rollout.verdict is not None
    assert "ended before its files were copied" in rollout.verdict.told


async def test_too_many_bytes_get_nothing() -> None:
    rollout = await run(RIGHT + "open('large', 'wb').write(bytes(2 << 20))", max_copy_bytes=1 << 20)
    assert reward(rollout) == 0.0
    assert rollout.verdict is not None
    assert "more than 1048576 bytes" in rollout.verdict.told


async def test_a_sandbox_that_fails_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: SandboxPool, **_: object) -> None:
        raise SandboxError("no memory")

    monkeypatch.setattr(SandboxPool, "session", broken)
    verdict = (await run(RIGHT)).verdict
    assert verdict is not None
    assert verdict.fault is not None
    assert (verdict.score, verdict.fault.message) == (None, "no memory")


async def test_a_socket_that_cannot_be_made_is_a_fault_of_one_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verl_tool.gateway.program.session_socket._bind", bind)
    rollout = await run("")
    assert rollout.fault is not None
    assert "No space left" in rollout.fault.message
    assert rollout.verdict is None


@pytest.mark.parametrize("sent", [b"\0\0\0\4abcd", b"\0\0\0\4ab", b"\xff\xff\xff\xff", b""])
async def test_a_copy_that_breaks_off_is_none(sent: bytes) -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(sent)
    stream.feed_eof()
    with WorkspaceCopy(1 << 20) as copy:
        await copy.receive(stream)
        assert copy.problem


async def verdict_on(content: bytes, check: Verification, containers: ProgramContainers | None = None) -> Verdict:
    stream = asyncio.StreamReader()
    stream.feed_data(len(content).to_bytes(4, "big") + content + bytes(4))
    verifier = workspace_verifier.WorkspaceVerifier(AgentProgram().limits)
    with WorkspaceCopy(1 << 20) as copy:
        await copy.receive(stream)
        assert not copy.problem
        verdict = await verifier.verify(copy, check, containers)
    await verifier.close()
    return verdict


def tar_of(name: str, content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


async def test_a_tar_that_is_none_gets_nothing() -> None:
    verdict = await verdict_on(b"abcd", verification())
    assert (verdict.score, verdict.told[:45]) == (0.0, "the files of the program cannot be checked: t")


@pytest.mark.parametrize("max_bytes", [100, 1 << 20])
async def test_a_late_copy_is_a_fault_unless_it_is_large(max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_verifier, "_LARGE_COPY_BYTES", max_bytes)
    monkeypatch.setattr(Verification, "copy_seconds", 0.01)
    monkeypatch.setattr(workspace_verifier, "_UNPACK", "cat > /dev/null; sleep 5")
    verdict = await verdict_on(tar_of("a", b"1"), verification())
    assert (verdict.score, verdict.fault is None) == ((0.0, True) if max_bytes == 100 else (None, False)), verdict


async def test_a_container_that_vanishes_under_the_tests_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, options = AgentProgram().limits, ContainerOptions(engine=stand_in(tmp_path, monkeypatch))
    containers = ProgramContainers("any", options, limits)
    told = await verdict_on(tar_of("a", b"1"), verification("cat a; echo 1 > /logs/verifier/reward.txt"), containers)
    assert (told.reward, told.told) == (1.0, "1")
    execute = Container.exec

    async def vanish(self: Container, command: Any, **options: Any) -> RunResult:
        if command[-1] == "/tests/test.sh":
            await self.stop()
        return await execute(self, command, **options)

    monkeypatch.setattr(Container, "exec", vanish)
    lost = await verdict_on(tar_of("a", b"1"), verification(), containers)
    assert (lost.score, "container ended" in lost.told) == (0.0, True)


@pytest.fixture(params=["stand-in", "docker", "podman"])
def container(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param == "stand-in":
        return {"image": "any", "container": {"engine": stand_in(tmp_path, monkeypatch)}}
    return {"image": REAL_IMAGE, "container": {"engine": real(request.param)}}


CONTAINER_CASES = {
    "right": (RIGHT, 1.0),
    "forges": (FORGES, 0.0),
    "leaves a process": (LEAVES_A_PROCESS, 0.0),
    "links to secrets": (LINKS_TO_SECRETS, 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("code", "wanted"), CONTAINER_CASES.values(), ids=CONTAINER_CASES)
async def test_a_verifier_in_a_fresh_container(code: str, wanted: float, container: dict[str, Any]) -> None:
    rollout = await run(code, **container)
    assert reward(rollout) == wanted, rollout.verdict


@pytest.mark.slow
async def test_a_verifier_in_the_folder_of_an_image(container: dict[str, Any]) -> None:
    if container["image"] == "any":
        pytest.skip("the stand-in has no files of its own")
    options = {**container, "container": {**container["container"], "workdir": "/srv", "writable": True}}
    forges = "open('/usr/bin/cmp', 'w').write('#!/bin/sh\\nexit 0\\n'); open('in.txt', 'w').write('other')\n"
    assert reward(await run(RIGHT, **options)) == 1.0
    assert reward(await run(RIGHT + forges, **options)) == 0.0
    slow = await run(RIGHT + "import time; time.sleep(60)", **{**options, "seconds": 6})
    assert (reward(slow), slow.extra["agent_program"]["exit_code"]) == (1.0, None)
    late = await run(RIGHT, verification("sleep 60", seconds=5.0), **options)
    assert (reward(late), "did not end within 5 s" in late.verdict.told) == (0.0, True)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workdir": "/", "writable": True}, "workdir=/ is the whole image"),
        ({"workdir": "/testbed"}, "workdir=/testbed cannot be written to"),
    ],
)
async def test_a_folder_that_cannot_be_copied_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await run(RIGHT, image="any", container={"engine": "podman", **options})
