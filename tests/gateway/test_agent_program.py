"""Programs in the sandbox: they reach the gateway, and nothing else."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_sessions import make_session
from real_templates import TemplateTokenizer
from template_families import QWEN

from verl_tool.errors import SandboxError
from verl_tool.gateway.agent_program import MAX_OUTPUT, AgentProgram, ProgramResult, _read_result, run_program
from verl_tool.sandbox.isolation.levels import Level, strongest
from verl_tool.sandbox.sandboxed_service import ServiceSandbox

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or strongest().level is not Level.full, reason="no sandbox on this machine"
)

ASKS = """
import os, socket, urllib.request
print(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models", timeout=5).read().decode())
for address in (("192.0.2.1", 80), ("127.0.0.1", 22)):
    try:
        socket.create_connection(address, 2)
        print("connected to", address)
    except OSError:
        pass
try:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
    print("a netlink socket")
except OSError:
    pass
print(open("in/a.txt").read(), os.environ["TASK"], "SECRET" in os.environ, os.path.exists(os.environ["OUTSIDE"]))
open("answer.txt", "w").write("42")
"""


@pytest.fixture
async def socket(tmp_path: Path) -> AsyncIterator[Path]:
    """A server that answers each request by its first line."""
    folder = tmp_path / "gateway"
    folder.mkdir(mode=0o755)
    for each in (tmp_path, *tmp_path.parents[:2]):
        os.chmod(each, 0o755)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(head), head))
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, folder / "gateway.sock")
    os.chmod(folder / "gateway.sock", 0o666)
    yield folder / "gateway.sock"
    server.close()


async def run(socket: Path, *command: str, files: dict[str, bytes] | None = None, **options: object) -> ProgramResult:
    sandbox = ServiceSandbox()
    session = make_session(TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN), [])
    program = AgentProgram.model_validate({"command": command, "seconds": 30, **options})
    try:
        return await run_program(sandbox, program, session, socket, "do it", files)
    finally:
        await sandbox.close()


async def test_a_program_reaches_its_session_and_nothing_else(
    socket: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", "x")
    (tmp_path / "outside").write_text("x")
    env = {"TASK": "{task}", "OUTSIDE": str(tmp_path / "outside")}
    result = await run(
        *(socket, "python", "-c", ASKS), files={"in/a.txt": b"hello"}, env=env, keep_files=["answer.txt", "none"]
    )
    assert (result.exit_code, result.files) == (0, {"answer.txt": "42"}), result.output
    assert result.output == "GET /sessions/s/v1/models HTTP/1.1\nhello do it False False\n"


async def test_a_program_that_hangs_is_killed(socket: Path) -> None:
    result = await run(socket, "sh", "-c", "echo begun; sleep 60", seconds=1.5)
    assert (result.exit_code, result.output) == (None, "begun\n")


async def test_only_the_end_of_endless_output_is_stored(socket: Path) -> None:
    result = await run(socket, "sh", "-c", "yes | head -c 10000000; echo end; exit 3")
    assert result.exit_code == 3
    assert result.output.endswith("end\n")
    assert len(result.output) <= MAX_OUTPUT


async def test_a_program_that_kills_all_that_it_can_is_graded(socket: Path) -> None:
    result = await run(socket, "python", "-c", "import os; os.kill(-1, 9)")
    assert result.exit_code != 0


FORGES = """
import os
parent = os.getppid()
for name in ("mem", "fd/1"):
    try:
        open(f"/proc/{parent}/{name}", "r+b")
        print("opened", name)
    except OSError as error:
        pass
"""


async def test_a_program_cannot_change_what_is_reported_of_it(socket: Path) -> None:
    assert (await run(socket, "python", "-c", FORGES)).output == ""


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b"x", b'{"exit": "a"}', b'{"exit": null}', b"[" * 9999])
def test_a_report_that_was_tampered_with_is_a_failed_program(line: bytes) -> None:
    assert _read_result(line) == {"exit": -9, "files": {}}


async def test_placeholders_in_a_task_stay(socket: Path) -> None:
    sandbox, session = ServiceSandbox(), make_session(TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN), [])
    program = AgentProgram(command=("echo", "{session}: {task}"))
    result = await run_program(sandbox, program, session, socket, "print {key} and {session}")
    await sandbox.close()
    assert result.output == "s: print {key} and {session}\n"


async def test_what_cannot_be_started_is_an_error(socket: Path) -> None:
    with pytest.raises(SandboxError, match="nothere"):
        await run(socket, "nothere")
    with pytest.raises(SandboxError, match="not below the working directory"):
        await run(socket, "true", files={"../x": b""})


def test_a_record_has_the_settings_without_values_of_the_environment() -> None:
    program = AgentProgram(command=("sh", "-c", "x" * 9999), env={"TOKEN": "hidden"}, seconds=5)
    described = program.describe()
    assert "hidden" not in str(described)
    assert (described["env"], described["seconds"], len(described["command"][2])) == (["TOKEN"], 5.0, 2000)
