"""The tools with a workspace, where that is a container (the stand-in for docker)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from containers import REAL_IMAGE, real, stand_in
from toy_tools import until

from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.errors import ConfigError, LateError, SandboxError, ToolFault
from verl_tool.protocol import (
    FILES_FIELD,
    VERIFY_FIELD,
    WORKSPACE_IMAGE_FIELD,
    WORKSPACE_LIMITS_FIELD,
    FaultKind,
    StepRequest,
)
from verl_tool.sandbox import SandboxPool, SessionLimits
from verl_tool.sandbox.backends import Container, ContainerPool, ContainerSettings, container_pool
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.workspace import verifier
from verl_tool.servers.tools.workspace.workspace import Workspace
from verl_tool.verification import Verdict, Verification
from verl_tool.workspace_limits import NO_LIMITS, WorkspaceLimits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TOOLS = "ipython_code,bash_terminal,str_replace_editor"
OPTIONS = {
    "backend": "docker",
    "image": "any",
    "allowed_images": ["team/*"],
    "max_sessions": 2,
    "timeout_seconds": 20,
    "workers": 1,
}


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ToolSet]:
    stand_in(tmp_path, monkeypatch)
    served = ToolSet(load_tools(TOOLS, shared=OPTIONS))
    await served.start()
    yield served
    await served.close()
    assert os.listdir(tmp_path / "containers") == []


async def step(served: ToolSet, trajectory: str, action: str, finish: bool = False) -> str:
    [result] = await served.step([StepRequest(trajectory, action, finish=finish)], timeout_seconds=60)
    return result.fault.kind.value if result.fault else result.observation


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_the_tools_share_the_container_of_their_trajectory(served: ToolSet, tmp_path: Path) -> None:
    editor = "str_replace_editor"
    assert "has been created" in await step(
        served, "a", call(editor, command="create", path="d/a.txt", file_text="one\n")
    )
    assert "'one\\n'" in await step(served, "a", "<python>x = open('d/a.txt').read()\nx</python>")
    assert "ONE" in await step(served, "a", "<bash>cd d; y=1; tr a-z A-Z < a.txt</bash>")
    assert "1 /box/work/d" in await step(served, "a", "<bash>echo $y $PWD</bash>")
    edited = await step(served, "a", call(editor, command="str_replace", path="d/a.txt", old_str="one", new_str="two"))
    assert "1\ttwo" in edited
    assert "did not appear verbatim" in await step(
        served, "a", call(editor, command="str_replace", path="d/a.txt", old_str="one", new_str="x")
    )
    assert "d/a.txt" in await step(served, "a", call(editor, command="view", path="."))
    assert "does not exist" in await step(served, "a", call(editor, command="view", path="nowhere"))
    assert "1\tone" in await step(served, "a", call(editor, command="undo_edit", path="d/a.txt"))
    assert "one" in await step(served, "a", "<python>!cat d/a.txt</python>")
    for path, words in (("a\0b", "Invalid argument"), ("a" * 200_000, "too long"), ("a" * 5000, "too long")):
        assert words in await step(served, "a", call(editor, command="view", path=path))
    assert len(os.listdir(tmp_path / "containers")) == 1
    fault = (await served.fork("a", "c", timeout_seconds=60)).fault
    assert fault is not None
    assert fault.kind.value == "not_forkable"
    assert "FileNotFoundError" in await step(served, "b", "<python>open('d/a.txt')</python>")
    assert await step(served, "c", "<python>1</python>") == "overloaded"
    await step(served, "a", "", finish=True)
    assert len(os.listdir(tmp_path / "containers")) == 1


async def test_a_shell_in_a_container_is_interrupted_and_takes_keys(served: ToolSet) -> None:
    await step(served, "a", "<bash>z=kept</bash>")
    late = await step(served, "a", call("bash", command="sleep 100", seconds=0.5))
    assert "was interrupted" in late
    assert "kept" in await step(served, "a", "<bash>echo $z</bash>")
    assert "Exit code: 3" in await step(served, "a", "<bash>(exit 3)</bash>")
    assert "takes keys" in await step(served, "a", call("bash", keys=["cat", "Enter", "said", "Enter"], seconds=3))
    assert "runs in the foreground" in await step(served, "a", "<bash>echo no</bash>")
    await step(served, "a", call("bash", keys=["C-c"], seconds=3))
    for _ in range(20):  # until the shell has noticed that its program is gone
        if "runs in the foreground" not in (shown := await step(served, "a", "<bash>echo $z</bash>")):
            break
        await asyncio.sleep(0.5)
    assert "kept" in shown
    assert "a new one has started" in await step(served, "a", "<bash>exit 4</bash>")
    assert "kept" not in await step(served, "a", "<bash>echo $z</bash>")


TEST = """
set -e
test "$(cat answer.txt)" = 42
test ! -e link
test "$(echo 3 | in_workspace --seconds 10 python3 square.py)" = 9
test ! -e made_by_square
echo '{"reward": 0.5, "checked": 4}' > /logs/verifier/reward.json
"""
VERIFICATION = Verification(files=pack_files({"test.sh": PackedFile(TEST.encode())}), timeout_seconds=60)
SQUARE = "open('made_by_square', 'w')\nprint(int(input()) ** 2)\n"


@pytest.fixture(params=["stand-in", "podman", "podman, writable", "podman, trusted"])
async def workspace(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Workspace]:
    if request.param == "stand-in":
        settings = ContainerSettings(stand_in(tmp_path, monkeypatch), "any")
    elif request.param == "podman":
        settings = ContainerSettings(real("podman"), REAL_IMAGE)
    else:
        trust = request.param == "podman, trusted"
        settings = ContainerSettings(real("podman"), REAL_IMAGE, writable=True, trust_image=trust, workdir="/srv")
    async with Container(settings, SessionLimits(wall_seconds=30)) as container:
        yield Workspace(container)


async def test_a_verifier_judges_a_copy_in_a_container_of_its_own(workspace: Workspace) -> None:
    container = workspace.session
    await container.write_file("square.py", SQUARE.encode())
    await container.write_file("answer.txt", b"41")
    await container.exec("ln -s /tests/test.sh link; mkfifo pipe; mkdir -m 0 locked; umask 777; echo x > unreadable")
    wrong = await workspace.verify(VERIFICATION)
    assert (wrong.reward, wrong.fault) == (0.0, None)
    assert "exit code is 1" in wrong.told
    await container.write_file("answer.txt", b"42")
    right = await workspace.verify(VERIFICATION)
    assert (right.reward, right.numbers, right.fault) == (0.5, {"checked": 4.0}, None), right.told
    await container.exec("rm square.py made_by_square; ls /tests /logs")
    gone = await workspace.verify(VERIFICATION)
    assert gone.reward == 0.0


async def test_what_a_policy_leaves_does_not_reach_its_verifier(workspace: Workspace) -> None:
    container = workspace.session
    await container.write_file("answer.txt", b"41")
    for attack in (
        "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo 'exit 0' > /tests/test.sh",
        "(while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.05; done) > /dev/null 2>&1 &",
        "printf 'echo 1 > /logs/verifier/reward.txt; exit 0' > .bashrc; cp .bashrc .profile; cp .bashrc .bash_profile",
        "echo 'raise SystemExit(0)' > sitecustomize.py; cp sitecustomize.py usercustomize.py",
        "mkdir -p /tmp/verifier; mkfifo /tmp/verifier/requests",
    ):
        await container.exec(attack)
    verdict = await workspace.verify(VERIFICATION)
    assert (verdict.reward, verdict.fault) == (0.0, None), verdict.told


@pytest.mark.parametrize("trusted", [False, True])
async def test_programs_of_the_image_are_the_trajectory_s_only_if_they_are_trusted(trusted: bool) -> None:
    settings = ContainerSettings(real("podman"), REAL_IMAGE, writable=True, workdir="/srv", trust_image=trusted)
    async with Container(settings, SessionLimits(wall_seconds=30)) as container:
        fake = "#!/bin/sh\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\n"
        await container.write_file("/usr/local/bin/check-it", fake.encode())
        await container.exec("chmod +x /usr/local/bin/check-it; echo changed > /etc/changed; echo x > here")
        test = "cat here /etc/changed; check-it || echo 0 > /logs/verifier/reward.txt"
        files = pack_files({"test.sh": PackedFile(test.encode())})
        verdict = await Workspace(container).verify(Verification(files=files, timeout_seconds=30))
        assert verdict.reward == float(trusted), verdict.told
        assert verdict.told.startswith("x\nchanged" if trusted else "x\ncat: /etc/changed")


async def test_a_branch_of_a_changed_image_is_judged_like_its_origin() -> None:
    settings = ContainerSettings(real("podman"), REAL_IMAGE, writable=True, workdir="/srv")
    test = "test ! -e /etc/changed; echo $(($? == 0 && $(grep -c two here))) > /logs/verifier/reward.txt"
    verification = Verification(files=pack_files({"test.sh": PackedFile(test.encode())}), timeout_seconds=30)
    async with Container(settings, SessionLimits(wall_seconds=30)) as container:
        await container.exec("echo changed > /etc/changed; echo one > here")
        branch = await container.fork()
        try:
            await branch.exec("echo two > here")
            second = await branch.fork()
            try:
                for each, reward in ((branch, 1.0), (second, 1.0), (container, 0.0)):
                    verdict = await Workspace(each).verify(verification)
                    assert (verdict.reward, verdict.fault) == (reward, None), verdict.told
            finally:
                await second.close()
            assert (await branch.exec("cat here /etc/changed")).stdout == "two\nchanged\n"
        finally:
            await branch.close()


@pytest.fixture
async def image_of_a_user(tmp_path: Path) -> tuple[str, str]:
    """An engine, and an image whose user owns a folder of PATH, and the folder with the work folder."""
    podman, image = real("podman"), "localhost/verl-tool-tests:user"
    lines = (
        f"FROM {REAL_IMAGE}",
        "RUN mkdir -p /opt/own /srv/work && chown -R 1000:1000 /opt/own /srv",
        "ENV PATH=/opt/own:/usr/local/bin:/usr/bin:/bin",
        "ENV BASH_ENV=/opt/own/startup LD_LIBRARY_PATH=/opt/own:/usr/local/lib",
        "USER 1000:1000",
        "WORKDIR /srv/work",
    )
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    limits = ["--ulimit", "nofile=512:512", "--ulimit", "nproc=1000:1000"]
    build = [podman, "build", "--quiet", "--network", "none", *limits, "--tag", image, str(tmp_path)]
    await asyncio.to_thread(subprocess.run, build, check=True, capture_output=True, timeout=120)
    return podman, image


FORGED = "#!/bin/sh\n/bin/mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\n"


@pytest.mark.parametrize("user", ["", "root"])
async def test_programs_and_files_of_the_user_are_not_the_verifier_s(
    image_of_a_user: tuple[str, str], user: Literal["", "root"]
) -> None:
    podman, image = image_of_a_user
    for trusted in (False, True):
        settings = ContainerSettings(podman, image, writable=True, trust_image=trusted)
        async with Container(settings, SessionLimits(wall_seconds=30)) as container:
            for name in ("bash", "sh", "cat", "mkdir", "mkfifo", "chmod", "startup"):
                await container.write_file(f"/opt/own/{name}", FORGED.encode())
            assert (await container.exec(["/bin/chmod", "-R", "+x", "/opt/own"])).ok
            if not trusted:
                await container.write_file("/opt/own/libc.so.6", b"none")
            verdict = await Workspace(container).verify(VERIFICATION.model_copy(update={"user": user}))
            assert verdict.reward == float(trusted), verdict.told


ROOTS = """
test "$(id -u) $(id -gn)" = "0 root" && test "$(cat closed)" = "of the user alone" || exit 3
touch /etc/changed && chown 1000 /etc/changed && test "$(in_workspace id -u)" = 1000 || exit 4
in_workspace touch /etc/changed && exit 5
echo 1 > /logs/verifier/reward.txt
"""


async def test_a_verifier_can_be_root(image_of_a_user: tuple[str, str], tmp_path: Path) -> None:
    podman, image = image_of_a_user
    files = pack_files({"test.sh": PackedFile(ROOTS.encode())})
    verification = Verification(files=files, timeout_seconds=30, user="root")
    for writable in (True, False):
        async with Container(ContainerSettings(podman, image, writable=writable), SessionLimits()) as container:
            await container.exec("(umask 077; echo of the user alone > closed)")
            if writable:
                verdict = await Workspace(container).verify(verification)
                assert (verdict.reward, verdict.fault) == (1.0, None), verdict.told
            else:
                with pytest.raises(
                    ToolFault, match="the row's verifier is root, which needs a container with"
                ) as raised:
                    await Workspace(container).verify(verification)
                assert raised.value.kind is FaultKind.MISCONFIGURED
    async with SandboxPool(workers=1, warm_modules=(), for_sessions=True) as pool, pool.session() as session:
        with pytest.raises(ToolFault, match="the row's verifier is root, which needs a container with"):
            await Workspace(session).verify(verification)


@pytest.fixture(scope="module")
def open_image(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """An engine, and an image in which much is the user's: the parent of a folder of PATH and of the work folder,
    /logs and /etc/passwd. /closed is root's alone."""
    podman, image = real("podman"), "localhost/verl-tool-tests:open"
    lines = (
        f"FROM {REAL_IMAGE}",
        "RUN mkdir -p /srv/work /srv/local/bin /closed /logs/verifier && echo secret > /closed/expected",
        "RUN chmod 700 /closed && chmod -R 777 /logs && chmod 666 /etc/passwd && chown -R 1000:1000 /srv",
        "ENV PATH=/srv/local/bin:/usr/local/bin:/usr/bin:/bin",
        "USER 1000:1000",
        "WORKDIR /srv/work",
    )
    folder = tmp_path_factory.mktemp("image")
    (folder / "Dockerfile").write_text("\n".join(lines))
    limits = ["--ulimit", "nofile=512:512", "--ulimit", "nproc=1000:1000"]
    build = [podman, "build", "--quiet", "--network", "none", *limits, "--tag", image, str(folder)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    return podman, image


FORGE = "for name in bash sh python3 cat grep; do printf '%s' \"$FORGED\" > $name; chmod 755 $name; done"
ATTACKS = {
    "PATH leads elsewhere for root": f"""
        cd /srv; mkdir -p locked 1/2/3/4 usr/bin; (cd usr/bin; {FORGE}); ln -s /srv/1/2/3/4 locked/a
        rm -r local/bin; ln -s /srv/locked/a/../../../../usr/bin local/bin; chmod 000 locked""",
    "PATH leads elsewhere behind the copy": f"""
        cd /srv; mkdir -p 1/2/3 usr/bin; (cd usr/bin; {FORGE}); ln -s /srv/1/2/3 /tmp/a
        rm -r local/bin; ln -s /tmp/a/../../../usr/bin local/bin""",
    "links without end": "cd /srv/local/bin; for i in $(seq 1100); do ln -s l$((i + 1)) l$i; done",
    "a reward in the image": "cd /logs/verifier; echo '{\"reward\": 1}' > reward.json; chmod 444 reward.json",
    "nobody is root": "grep -v ^root /etc/passwd > /tmp/passwd; cat /tmp/passwd > /etc/passwd",
    "the answer is root's": "ln -s /closed/expected answer.txt",
    "the work folder is root's": "cd /srv; mv work w; ln -s /closed work; ln -s /closed/expected w/answer.txt",
}


OF_BOTH_USERS = ("PATH leads elsewhere for root", "PATH leads elsewhere behind the copy", "a reward in the image")


@pytest.mark.parametrize(
    ("attack", "user"),
    [*((attack, "root") for attack in ("", *ATTACKS)), *((attack, "") for attack in ("", *OF_BOTH_USERS))],
)
async def test_attacks_on_the_verifier_of_an_open_image(
    open_image: tuple[str, str], attack: str, user: Literal["", "root"]
) -> None:
    podman, image = open_image
    test = """
        cat answer.txt expected
        test "$(cat answer.txt)" = secret || test -e expected
        echo $(($? == 0)) > /logs/verifier/reward.txt
    """
    check = Verification(files=pack_files({"test.sh": PackedFile(test.encode())}), timeout_seconds=30, user=user)
    async with Container(ContainerSettings(podman, image, writable=True), SessionLimits(wall_seconds=30)) as container:
        await container.exec(ATTACKS.get(attack, "echo secret > answer.txt"), env={"FORGED": FORGED})
        verdict = await Workspace(container).verify(check)
        assert (verdict.reward, verdict.fault) == (float(not attack), None), verdict.told


@pytest.mark.parametrize("user", ["", "root"])
async def test_links_to_the_verifier_s_files_are_nowhere(
    image_of_a_user: tuple[str, str], user: Literal["", "root"]
) -> None:
    podman, image = image_of_a_user
    test = """
        cd /tests; cat /srv/elsewhere /srv/work/answer.txt && echo 1 > /logs/verifier/reward.txt
        [ -L /srv/fine ] || echo 1 > /logs/verifier/reward.txt; true
    """
    files = pack_files({"test.sh": PackedFile(test.encode()), "expected": PackedFile(b"secret")})
    check = Verification(files=files, timeout_seconds=30, user=user)
    async with Container(ContainerSettings(podman, image, writable=True), SessionLimits(wall_seconds=30)) as container:
        await container.exec(
            "ln -s /tests/expected /srv/elsewhere; ln -s /proc/self/cwd/../../tests/expected answer.txt"
        )
        await container.exec("ln -s work /srv/fine")
        verdict = await Workspace(container).verify(check)
        assert (verdict.reward, "secret" in verdict.told) == (0.0, False), verdict
        await container.exec("mv /srv/work /srv/old; ln -s /tests /srv/work", cwd="/")
        verdict = await Workspace(container).verify(check)
        assert (verdict.reward, "/srv/work is a link that leads to" in verdict.told) == (0.0, True), verdict


async def test_folders_of_path_in_the_workspace_are_not_the_verifier_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ContainerSettings(stand_in(tmp_path, monkeypatch), "any")
    monkeypatch.setenv("PATH", f"/box/work/bin:{os.environ['PATH']}")
    async with Container(settings, SessionLimits(wall_seconds=30)) as container:
        for name in ("bash", "chmod", "mkdir", "cat"):
            await container.write_file(f"bin/{name}", b"#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
        assert (await container.exec(["/bin/chmod", "-R", "+x", "bin"])).ok
        verdict = await Workspace(container).verify(VERIFICATION)
        assert (verdict.reward, "exit code" in verdict.told) == (0.0, True), verdict


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("limit", ["LARGE_BYTES", ""])
async def test_a_late_copy_is_a_fault_unless_the_workspace_is_large(
    limit: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def copy(self: Container, target: Container, seconds: float, *_: object) -> str:
        await asyncio.sleep(0.2)
        raise LateError(f"files were not copied within {seconds:g} s", retryable=False)

    async def hang(*_: object) -> str:
        await asyncio.sleep(60)
        raise AssertionError

    settings = ContainerSettings(stand_in(tmp_path, monkeypatch), "any")
    monkeypatch.setattr(Container, "_copy_to", hang if limit and late else copy)
    monkeypatch.setattr(verifier, "_LARGE_SECONDS", 3.0)
    if limit:
        monkeypatch.setattr(verifier, limit, 100)
    check = Verification(files=VERIFICATION.files, timeout_seconds=2)
    async with Container(settings, SessionLimits(wall_seconds=30)) as container:
        await container.write_file("large", bytes(200))
        if not limit:
            with pytest.raises(SandboxError, match="not copied within 60 s"):
                await Workspace(container).verify(check)
            return
        verdict = await Workspace(container).verify(check)
        assert (verdict.reward, "is large and was not judged in 5 s" in verdict.told) == (0.0, True)
        assert verdict.seconds < 20


async def test_a_pool_whose_containers_do_not_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ContainerPool(ContainerSettings(stand_in(tmp_path, monkeypatch), "broken"), SessionLimits(), warm=2)
    pool.fill()
    with pytest.raises(SandboxError, match="no memory"):
        await asyncio.wait_for(pool.take(), 60)
    await pool.close()


async def test_a_workspace_of_files_is_forked_and_one_with_python_state_is_not(workspace: Workspace) -> None:
    await workspace.session.write_file("a.txt", b"one")
    await workspace.session.exec(
        "mkdir -p d/e; ln a.txt d/hard; ln -s ../a.txt d/soft; chmod 640 a.txt; echo t > /tmp/t"
    )
    branch = await workspace.fork()
    try:
        shown = await branch.session.exec("cat d/hard d/soft /tmp/t; stat -c '%a %h' a.txt; echo two > a.txt")
        assert shown.stdout == "oneonet\n640 2\n"
        assert await workspace.session.read_file("a.txt") == b"one"
    finally:
        await branch.close()
    await workspace.session.run("x = 1")
    with pytest.raises(ToolFault, match="Python state") as caught:
        await workspace.fork()
    assert caught.value.kind is FaultKind.NOT_FORKABLE


async def test_files_of_a_row_are_there_and_its_image_is_used(served: ToolSet, tmp_path: Path) -> None:
    files = pack_files({"in/run.sh": PackedFile(b"#!/bin/sh\necho ran\n", executable=True)})
    extra = {FILES_FIELD: files, WORKSPACE_IMAGE_FIELD: "any"}
    [result] = await served.step([StepRequest("a", "<bash>in/run.sh</bash>", extra=extra)], timeout_seconds=60)
    assert "ran" in result.observation
    for image, kind, words in (
        ("other", FaultKind.BAD_REQUEST, r"allowed_images=\['team/\*'\] does not allow"),
        (7, FaultKind.BAD_REQUEST, "does not allow"),
        ("team/missing", FaultKind.SANDBOX, "no image team/missing and cannot pull it"),
    ):
        request = StepRequest(f"b{image}", "<bash>pwd</bash>", extra={WORKSPACE_IMAGE_FIELD: image})
        [result] = await served.step([request], timeout_seconds=60)
        assert result.fault is not None
        assert result.fault.kind is kind
        assert re.search(words, result.fault.message), result.fault.message
    request = StepRequest("c", "<bash>pwd</bash>", extra={WORKSPACE_IMAGE_FIELD: "team/one"})
    [result] = await served.step([request], timeout_seconds=60)
    assert "/box/work" in result.observation


@pytest.mark.parametrize(
    ("field", "value"), [(WORKSPACE_IMAGE_FIELD, "any"), (WORKSPACE_LIMITS_FIELD, {"memory_mb": 512})]
)
async def test_what_is_of_containers_needs_them(field: str, value: object) -> None:
    served = ToolSet(load_tools("bash_terminal", shared={"workers": 1}))
    await served.start()
    try:
        requests = [StepRequest("a", "<bash>pwd</bash>", extra={field: each}) for each in (value, None)]
        results = [(await served.step([request], timeout_seconds=60))[0] for request in requests]
        assert results[0].fault is not None
        assert results[0].fault.kind is FaultKind.MISCONFIGURED
        assert (results[1].fault, "box" in results[1].observation) == (None, True), "a column has the keys of all rows"
    finally:
        await served.close()


async def test_a_row_s_limits_are_those_of_its_container_and_of_its_verifier_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = stand_in(tmp_path, monkeypatch)
    options = {**OPTIONS, "max_row_memory_mb": 8192, "max_row_cpus": 1.5, "allowed_hosts": ["*.example.org"]}
    served = ToolSet(load_tools("bash_terminal", shared={**options, "backend": command}))
    await served.start()
    requested = {"cpus": 1.5, "memory_mb": 4096, "allowed_hosts": ["a.example.org"]}
    seen: list[dict[str, list[str]]] = []

    async def verify(workspace: Workspace, _: Verification) -> Verdict:
        async with workspace.session.companion(workspace.session.limits) as companion:
            for each in (workspace.session, companion):
                assert isinstance(each, Container)
                assert each._settings.allowed_hosts == ("a.example.org",)
                seen.append(json.loads((tmp_path / "containers" / each.name / "options.json").read_text()))
        return Verdict(1.0, "")

    monkeypatch.setattr(Workspace, "verify", verify)
    try:
        for number, (limits, words) in enumerate(
            [
                ({**requested, "memory_mb": 8193}, "requests memory_mb=8193, and at most 8192 is allowed"),
                ({**requested, "cpus": 2}, "raise max_row_cpus"),
                ({**requested, "allowed_hosts": ["pypi.org"]}, "only narrow"),
                ({"gpus": 1}, "workspace_limits.gpus is 1"),
            ]
        ):
            request = StepRequest(f"w{number}", "<bash>pwd</bash>", extra={WORKSPACE_LIMITS_FIELD: limits})
            [refused] = await served.step([request], timeout_seconds=60)
            assert refused.fault is not None
            assert refused.fault.kind is FaultKind.BAD_REQUEST
            assert words in refused.fault.message
        extra = {WORKSPACE_LIMITS_FIELD: requested}
        [result] = await served.step(
            [StepRequest("a", "<bash>printenv https_proxy</bash>", extra=extra)], timeout_seconds=60
        )
        assert "3128" in result.observation
        judged = {VERIFY_FIELD: VERIFICATION.model_dump()}
        [verdict] = await served.step([StepRequest("a", "", extra=judged)], timeout_seconds=60)
        assert verdict.reward == 1.0
    finally:
        await served.close()
    assert len(seen) == 2
    for each in seen:
        assert (each["--memory"], each["--cpus"]) == ([str(4 << 30)], ["1.5"])


@pytest.mark.parametrize("own", [None, (), ("b.example.org",)])
async def test_a_verifier_may_reach_other_hosts_than_the_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: tuple[str, ...] | None
) -> None:
    hosts = ("a.example.org",)
    settings = ContainerSettings(stand_in(tmp_path, monkeypatch), "any", allowed_hosts=hosts)
    seen = []
    start = Container.start

    async def note(container: Container) -> None:
        seen.append(container._settings.allowed_hosts)
        await start(container)

    monkeypatch.setattr(Container, "start", note)
    script = pack_files({"test.sh": PackedFile(b"printenv https_proxy; echo 1 > /logs/verifier/reward.txt")})
    async with Container(settings, SessionLimits(wall_seconds=30)) as container:
        verification = Verification(files=script, allowed_hosts=own)
        verdict = await Workspace(container).verify(verification)
        assert seen == [hosts, hosts if own is None else own]
        assert ("3128" in verdict.told) == (own != ())
        served = load_tools("bash_terminal", shared={**OPTIONS, "allowed_hosts": ["a.example.org"]})[0]
        if own:
            with pytest.raises(ToolFault, match=r"the verifier: the row allows the host 'b\.example\.org'"):
                await served.verify(Workspace(container), verification)


@pytest.mark.parametrize("shared", [True, False])
async def test_a_shared_verifier_finds_what_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    stand_in(tmp_path, monkeypatch)
    options = {**OPTIONS, "writable": True, "workdir": "/box/work", "shared_verifier": shared}
    script = b'kill -0 "$(cat pid)"; test ! -e /tests/old && echo $((1 - $?)) > /logs/verifier/reward.txt'
    if shared:
        script += b'; test -z "$PYTHONSAFEPATH"'
    verification = Verification(files=pack_files({"test.sh": PackedFile(b"set -e\n" + script)}), timeout_seconds=20)
    served = ToolSet(load_tools("bash_terminal", shared=options))
    await served.start()
    try:
        left = "sleep 100 & echo $! > pid; touch /tests/old" if shared else "sleep 100 & echo $! > pid"
        assert "Exit code" not in await step(served, "a", f"<bash>{left}</bash>")
        request = StepRequest("a", "", extra={VERIFY_FIELD: verification.model_dump()})
        [verdict] = await served.step([request], timeout_seconds=60)
        assert (verdict.fault, verdict.reward) == (None, float(shared)), verdict.observation
    finally:
        await served.close()


@pytest.mark.parametrize(
    ("own", "words"), [({"allowed_hosts": ("a.b",)}, "reaches"), ({"user": "root"}, "verifier is root")]
)
async def test_what_a_shared_verifier_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, object], words: str
) -> None:
    async with Container(ContainerSettings(stand_in(tmp_path, monkeypatch), "any"), SessionLimits()) as container:
        with pytest.raises(ToolFault, match=rf"{words}.*leave out shared_verifier"):
            await verifier.verify_in_place(container, VERIFICATION.model_copy(update=own))


async def test_a_verifier_with_hosts_needs_a_container() -> None:
    async with SandboxPool() as pool, pool.session() as session:
        for hosts in ((), ("a.example.org",)):
            verification = VERIFICATION.model_copy(update={"allowed_hosts": hosts})
            if hosts:
                with pytest.raises(ToolFault, match="the sandbox has no network"):
                    await Workspace(session).verify(verification)
            else:
                assert (await Workspace(session).verify(verification)).reward == 0.0


async def test_containers_wait_for_rows_with_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ContainerPool(ContainerSettings(stand_in(tmp_path, monkeypatch), "any"), SessionLimits(), warm=1)
    small = WorkspaceLimits(memory_mb=64)
    taken = [await pool.take(limits=small)]
    [ahead] = pool._waiting["any", small]
    await asyncio.wait([ahead])
    taken += [await pool.take(), await pool.take(limits=WorkspaceLimits(memory_mb=64))]
    assert taken[2] is ahead.result()
    assert [container.limits.memory_bytes for container in taken] == [64 << 20, 2 << 30, 64 << 20]
    for container in taken:
        await container.stop()
    await pool.close()


async def test_a_pool_replaces_containers_that_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ContainerPool(ContainerSettings(stand_in(tmp_path, monkeypatch), "any"), SessionLimits(), warm=2)
    pool.fill()
    await until(lambda: len(os.listdir(tmp_path / "containers")) == 2)
    taken = [await pool.take() for _ in range(3)]
    assert len({container.name for container in taken}) == 3
    await until(lambda: len(os.listdir(tmp_path / "containers")) == 5)
    other = await pool.take("another")
    assert (await other.exec("echo well")).stdout == "well\n"
    for container in (*taken, other):
        await container.stop()
    ready = [task.result() for task in pool._waiting["any", NO_LIMITS] if task.done()]
    [dead, _] = ready if len(ready) == 2 else [None, None]
    if dead is not None:
        os.system(f"docker rm --force {dead.name}")  # noqa: ASYNC221
        await until(lambda: not dead.alive)
    fresh = [await pool.take() for _ in range(2)]
    assert all(container.alive for container in fresh)
    for container in fresh:
        await container.stop()
    await pool.close()
    await until(lambda: os.listdir(tmp_path / "containers") == [])


async def test_containers_of_the_latest_images_are_started_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ContainerPool(ContainerSettings(stand_in(tmp_path, monkeypatch), "team/*"), SessionLimits(), warm=1)
    monkeypatch.setattr(container_pool, "MAX_IMAGES", 2)
    taken = [await pool.take("team/a")]
    assert list(pool._waiting) == [("team/a", NO_LIMITS)]
    [ahead] = pool._waiting["team/a", NO_LIMITS]
    await asyncio.wait([ahead])
    taken.append(await pool.take("team/a"))
    assert taken[1] is ahead.result()
    taken += [await pool.take("team/b"), await pool.take("team/a"), await pool.take("team/c")]
    assert list(pool._waiting) == [("team/a", NO_LIMITS), ("team/c", NO_LIMITS)]
    await until(lambda: len(os.listdir(tmp_path / "containers")) == 7)
    for container in taken:
        await container.stop()
    await pool.close()
    await until(lambda: os.listdir(tmp_path / "containers") == [])


async def test_a_container_that_ends_is_a_lost_state(served: ToolSet, tmp_path: Path) -> None:
    await step(served, "a", "<python>x = 1</python>")
    [name] = os.listdir(tmp_path / "containers")
    os.system(f"docker rm --force {name}")  # noqa: ASYNC221
    await until(lambda: not os.listdir(tmp_path / "containers"))
    assert await step(served, "a", "<python>x</python>") == "state_lost"


async def test_options_without_effect_and_images_that_are_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, words in (
        ({"image": "debian:12"}, "image has no effect with backend='sandbox'"),
        ({"backend": "docker"}, "backend='docker' needs image"),
        ({"trust_image": True}, "trust_image has no effect with backend='sandbox'"),
        ({"writable": True}, "writable has no effect with backend='sandbox'"),
        ({"provider": {"app": "x"}}, "provider has no effect with backend='sandbox'"),
        ({"backend": "podman", "image": "x", "allowed_modules": ["math"]}, "allowed_modules has no effect"),
        ({"backend": "lxc"}, "backend is 'lxc'"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_tools("ipython_code", shared=options)
    stand_in(tmp_path, monkeypatch)
    with pytest.raises(SandboxError, match="no image missing and cannot pull it"):
        await ToolSet(load_tools(TOOLS, shared={**OPTIONS, "image": "missing"})).start()
