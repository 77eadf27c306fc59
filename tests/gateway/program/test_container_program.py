"""Agent programs in containers: by the stand-in for docker, and by docker and podman where they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex
from socket import AF_UNIX
from socket import socket as Socket
from typing import Any

import pytest
from agent_sessions import WritingGenerator
from containers import REAL_IMAGE, real, stand_in
from real_templates import TemplateTokenizer
from template_families import QWEN

from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.errors import ConfigError, SandboxError
from verl_tool.formats import format_by_name
from verl_tool.gateway.agent_host import AgentHost, AgentTask
from verl_tool.gateway.agent_program import AgentProgram, ProgramResult, run_program
from verl_tool.gateway.gateway_app import Gateway
from verl_tool.gateway.program.container_program import ContainerOptions, ProgramContainers
from verl_tool.gateway.session import SessionModel
from verl_tool.sandbox.backends.providers.orphans import OWNER_LABEL, owner
from verl_tool.sandbox.inside.wire import WORK_DIRECTORY
from verl_tool.sandbox.sandboxed_service import ServiceSandbox
from verl_tool.servers.cluster.direct_server import DirectServer
from verl_tool.verification import Verification
from verl_tool.workspace_limits import NO_LIMITS, WorkspaceLimits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TOKENIZER = TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN)
INSTALL = Path(os.environ.get("VERL_TOOL_AGENTS", Path(__file__).parents[3] / ".agents"))
STARTED = {"claude_code": "node_modules/.bin/claude", "mini_swe_agent": "mini/bin/mini"}
ASKS = """
import json, os, socket, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, body, {"content-type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"]
for address in (("192.0.2.1", 80), ("127.0.0.1", 22)):
    try:
        socket.create_connection(address, 2)
        print("connected to", address)
    except OSError:
        pass
open("answer.txt", "w").write(answer)
print(open("in/a.txt").read(), "SECRET" in os.environ, os.getcwd())
"""


def write_call(name: str, arguments: dict[str, str]) -> str:
    """A turn of the model that calls a tool."""
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call><|im_end|>"


class Place:
    """A gateway on a Unix socket, and an engine of containers."""

    def __init__(self, folder: Path, engine: str, image: str) -> None:
        self.folder, self.engine, self.image = folder, engine, image
        self.generator = WritingGenerator(TOKENIZER)
        model = SessionModel.create(self.generator, TOKENIZER, [format_by_name("hermes")], 1 << 20)
        self.gateway = Gateway(model)
        self.socket = folder / "gateway" / "gateway.sock"
        self.session = self.gateway.open_session()

    async def run(
        self,
        *command: str,
        files: dict[str, bytes] | None = None,
        row_image: str | None = None,
        row_limits: WorkspaceLimits = NO_LIMITS,
        **options: Any,
    ) -> ProgramResult:
        fields = {"command": command, "seconds": 60, "image": self.image, "memory_bytes": 512 << 20, **options}
        fields["container"] = {"engine": self.engine, **options.get("container", {})}
        program = AgentProgram.model_validate(fields)
        place = program.choose_place(ServiceSandbox(), row_image, row_limits)
        assert isinstance(place, ProgramContainers)
        return await run_program(place, program, self.session, self.socket, "say hello", files)

    def containers(self) -> list[str]:
        """Names of the containers that there are."""
        if self.engine not in ("docker", "podman") or self.image == "any":
            return os.listdir(self.folder / "containers")
        ask = [self.engine, "ps", "--all", "--quiet", "--filter", f"label={OWNER_LABEL}={owner()}"]
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(params=["stand-in", "docker", "podman"])
async def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Place]:
    if request.param == "stand-in":
        place = Place(tmp_path, stand_in(tmp_path, monkeypatch), "any")
    else:
        place = Place(tmp_path, real(request.param), REAL_IMAGE)
    place.socket.parent.mkdir()
    for each in (place.socket.parent, tmp_path, *tmp_path.parents[:2]):
        each.chmod(0o755)
    listener = Socket(AF_UNIX)
    listener.bind(str(place.socket))
    place.socket.chmod(0o666)
    listener.listen()
    server = DirectServer(listener)
    await server.open(place.gateway.app(for_agents=True))
    yield place
    await server.close(1.0)


async def test_a_program_reaches_its_session_and_nothing_else(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    place.generator.turns = ["Hello.<|im_end|>"]
    command = ("python3", "-c", ASKS, "{task}")
    result = await place.run(*command, files={"in/a.txt": b"given"}, keep_files=["answer.txt"])
    assert (result.exit_code, result.output) == (0, "given False /box/work\n")
    assert result.files == {"answer.txt": "Hello."}
    rollout = await place.session.finish(1.0)
    assert (len(rollout.rows), rollout.num_turns) == (1, 1)
    assert place.containers() == []


FETCHES = """
import http.client, sys
for port in sys.argv[1:]:
    connection = http.client.HTTPConnection("127.0.0.1", 3128, timeout=20)
    connection.request("GET", f"http://127.0.0.1:{port}/a")
    answer = connection.getresponse()
    print(answer.status, answer.read().decode())
"""


async def test_a_program_reaches_its_session_and_the_hosts_of_its_row(place: Place) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwell")
        writer.close()

    listeners = [await asyncio.start_server(serve, "127.0.0.1", 0) for _ in range(2)]
    ports = [str(listener.sockets[0].getsockname()[1]) for listener in listeners]
    hosts = tuple(f"127.0.0.1:{port}" for port in ports)
    place.generator.turns = ["Hello.<|im_end|>"]
    try:
        command = ("python3", "-c", f"{FETCHES.replace('argv[1:]', 'argv[2:]')}\n{ASKS}", "{task}", *ports)
        limits = WorkspaceLimits(allowed_hosts=hosts[:1], memory_mb=256)
        options = {"container": {"allowed_hosts": hosts}, "files": {"in/a.txt": b"given"}}
        result = await place.run(*command, row_limits=limits, keep_files=["answer.txt"], **options)
        assert result.output == f"200 well\n403 {hosts[1]} is not among the allowed hosts\n\ngiven False /box/work\n"
        assert result.files == {"answer.txt": "Hello."}
        with pytest.raises(ConfigError, match="only narrow"):
            await place.run("true", row_limits=WorkspaceLimits(allowed_hosts=("*",)), **options)
    finally:
        for listener in listeners:
            listener.close()


def test_a_row_s_limits_are_those_of_program_and_verifier() -> None:
    container = {"cpus": 0.5, "max_row_cpus": 2, "max_row_memory_mb": 8192}
    fields = {"command": ["x"], "image": "a", "memory_bytes": 1 << 30, "container": container}
    program = AgentProgram.model_validate(fields)
    limits = WorkspaceLimits(cpus=2, memory_mb=8192)
    place = program.choose_place(ServiceSandbox(), "b", limits)
    assert isinstance(place, ProgramContainers)
    made = place.container(workdir="/srv")
    assert (made._settings.image, made._settings.cpus, made.limits.memory_bytes) == ("b", 2, 8 << 30)
    for more in (WorkspaceLimits(cpus=2.5), WorkspaceLimits(memory_mb=8193), WorkspaceLimits(allowed_hosts=("a.b",))):
        with pytest.raises(ConfigError):
            program.choose_place(ServiceSandbox(), "b", more)
    with pytest.raises(ConfigError, match=r"workspace_limits=.* needs gateway\.program\.image"):
        AgentProgram(command=("x",)).choose_place(ServiceSandbox(), None, limits)
    with pytest.raises(ValueError, match="is no host"):
        ContainerOptions(allowed_hosts=("http://pypi.org",))
    messages = [{"role": "user", "content": "x"}]
    assert (
        AgentTask.of_row(messages, {"workspace_limits": {"cpus": 2, "memory_mb": 8192}}, None, "row 7").limits == limits
    )
    with pytest.raises(ConfigError, match=r"^row 7: tools_kwargs\.workspace_limits\.cpus is -1"):
        AgentTask.of_row(messages, {"workspace_limits": {"cpus": -1}}, None, "row 7")


async def test_a_verifier_reaches_hosts_of_its_own() -> None:
    fields = {
        "command": ["x"],
        "image": "a",
        "container": {"allowed_hosts": ["*.a.b"], "workdir": f"{WORK_DIRECTORY}/x"},
    }
    place = AgentProgram.model_validate(fields).choose_place(ServiceSandbox(), None, WorkspaceLimits(allowed_hosts=()))
    assert isinstance(place, ProgramContainers)
    files = pack_files({"test.sh": PackedFile(b"true")})
    await place.check_verifier(Verification(files=files, allowed_hosts=("c.a.b",)))
    with pytest.raises(ConfigError, match="only narrow"):
        await place.check_verifier(Verification(files=files, allowed_hosts=("a.b",)))
    found = [place.container(allowed_hosts=hosts)._settings.allowed_hosts for hosts in (None, (), ("c.a.b",))]
    assert found == [(), (), ("c.a.b",)]


def command_lines() -> bytes:
    """Those of all processes of the machine."""
    found = b""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += process.read_bytes()
    return found


async def test_values_of_its_environment_are_on_no_command_line(place: Place) -> None:
    value = token_hex(8)
    running = asyncio.ensure_future(place.run("sh", "-c", "sleep 1; printenv TOKEN", env={"TOKEN": value}))
    while not running.done():
        assert value.encode() not in command_lines()
        await asyncio.sleep(0.05)
    assert running.result().output == f"{value}\n"


async def test_what_is_readable_is_there_and_cannot_be_changed(place: Place) -> None:
    install = place.folder / "install"
    install.mkdir(mode=0o755)
    (install / "agent").write_text("#!/bin/sh\necho started; echo x 2>/dev/null > $0 || echo unchanged\n")
    (install / "agent").chmod(0o755)
    result = await place.run(str(install / "agent"), readable=[str(install)])
    assert result.output == "started\nunchanged\n"


async def test_a_program_that_hangs_is_killed_with_its_container(place: Place) -> None:
    result = await place.run("sh", "-c", "echo begun; sleep 60 & sleep 60", seconds=10)
    assert (result.exit_code, result.output) == (None, "begun\n")
    assert place.containers() == []


async def test_a_program_that_kills_all_that_it_can_is_graded(place: Place) -> None:
    if place.image == "any":
        pytest.skip("the stand-in has no processes of its own")
    result = await place.run("python3", "-c", "import os; os.kill(-1, 9)")
    assert result.exit_code != 0
    assert place.containers() == []


async def test_programs_run_at_the_same_time(place: Place) -> None:
    command = ("sh", "-c", "echo $OPENAI_BASE_URL; sleep 1")
    results = await asyncio.gather(*(place.run(*command) for _ in range(3)))
    assert {result.output for result in results} == {f"http://127.0.0.1:8000/sessions/{place.session.id}/v1\n"}


async def test_an_image_is_changed_only_where_that_is_allowed(place: Place) -> None:
    if place.image == "any":
        pytest.skip("the stand-in shows the machine's own files")
    command = ("sh", "-c", "pwd; touch changed && ls changed")
    closed = await place.run(*command, container={"workdir": "/srv"})
    assert closed.exit_code != 0
    opened = await place.run(*command, container={"workdir": "/srv", "writable": True})
    assert (opened.exit_code, opened.output) == (0, "/srv\nchanged\n")
    again = await place.run("ls", container={"workdir": "/srv", "writable": True})
    assert again.output == ""


async def test_what_cannot_be_started_is_an_error(place: Place) -> None:
    with pytest.raises(SandboxError, match="nothere"):
        await place.run("nothere")
    with pytest.raises(ConfigError, match="that is there"):
        await place.run("true", readable=["/nowhere/at/all"])
    if place.image == "any":
        with pytest.raises(SandboxError, match="no image missing and cannot pull it"):
            await place.run("true", row_image="missing")
        with pytest.raises(SandboxError, match="cannot be started"):
            await place.run("true", row_image="no-python")


WRITE = {
    "claude_code": ("Bash", {"command": "cat note.txt > answer.txt", "description": "d"}),
    "mini_swe_agent": ("bash", {"command": "cat note.txt > answer.txt"}),
}
END = {"mini_swe_agent": ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})}


@pytest.mark.parametrize("preset", WRITE)
async def test_a_real_agent_works_in_an_image(preset: str, place: Place) -> None:
    if place.image == "any":
        pytest.skip("the stand-in shows the machine's own files")
    if not (INSTALL / STARTED[preset]).exists():
        pytest.skip(f"{preset} is not installed in {INSTALL}; run bash scripts/install_agents.sh")
    place.generator.turns = [write_call(*WRITE[preset])]
    place.generator.turns.append(write_call(*END[preset]) if preset in END else "Done.<|im_end|>")
    program = AgentProgram(
        preset=preset,
        install=str(INSTALL),
        seconds=120,
        image=place.image,
        container=ContainerOptions(engine=place.engine, workdir="/srv", writable=True),
        keep_files=("answer.txt",),
    ).resolve()
    where = program.choose_place(ServiceSandbox())
    result = await run_program(where, program, place.session, place.socket, "Copy it.", {"note.txt": b"42"})
    rollout = await place.session.finish(1.0)
    assert result.files == {"answer.txt": "42"}, result.output
    assert (len(rollout.rows), rollout.num_turns) == (1, 2)
    assert place.containers() == []


def test_a_row_names_its_image() -> None:
    with pytest.raises(ConfigError, match=r"workspace_image='b' needs gateway\.program\.image"):
        AgentProgram(command=("x",)).choose_place(ServiceSandbox(), "b")
    place = AgentProgram(command=("x",), image="a").choose_place(ServiceSandbox(), "b")
    assert isinstance(place, ProgramContainers)
    assert place.image == "b"
    messages = [{"role": "user", "content": "x"}]
    assert AgentTask.of_row(messages, {"workspace_image": "b"}, None, "row 7").image == "b"
    with pytest.raises(ConfigError, match=r"row 7: tools_kwargs\.workspace_image=3 is not the name"):
        AgentTask.of_row(messages, {"workspace_image": 3}, None, "row 7")


def test_an_engine_on_other_machines_is_rejected() -> None:
    with pytest.raises(ValueError, match="containers of modal are on other machines, which have neither the gateway's"):
        ContainerOptions(engine="modal")


async def test_an_engine_that_is_not_there_is_named_before_the_first_run() -> None:
    program = AgentProgram(command=("true",), image="task:1", container=ContainerOptions(engine="no-such-engine"))
    host = AgentHost(Gateway(SessionModel.create(WritingGenerator(TOKENIZER, []), TOKENIZER, [], 64)).app(), program)
    with pytest.raises(ConfigError, match=r"container\.engine=no-such-engine"):
        await host.start()
    await host.close()
