"""Against this project's own ``POST /run_code``, and against answers of SandboxFusion's that it does not give."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from live_server import LiveServers
from piston_service import OddService

from tests.servers.tools.actions import results, text
from verl_tool.errors import StartError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.servers.tools._programs import NO_OUTPUT
from verl_tool.servers.tools.base import InvalidCall
from verl_tool.servers.tools.python_code import PythonCodeTool
from verl_tool.servers.tools.sandbox_fusion import URL_VARIABLE, SandboxFusionTool

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run_code_url() -> AsyncIterator[str]:
    running = LiveServers()
    server = await running.start([PythonCodeTool(workers=1)], api_key="s3cret")
    yield f"{server.url}/run_code"
    await running.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tool(run_code_url: str) -> AsyncIterator[SandboxFusionTool]:
    made = SandboxFusionTool(url=run_code_url, api_key="s3cret", timeout=1, max_memory_mb=256, max_output_length=300)
    await made.start()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def odd() -> AsyncIterator[OddService]:
    async with OddService() as made:
        yield made


def call(**arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': 'sandbox_fusion', 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("action", [a for a in SandboxFusionTool.example_actions if "bash" not in a])
async def test_every_example_action_in_python_is_answered(tool: SandboxFusionTool, action: str) -> None:
    assert await text(tool, action) == "2"


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("```py\nprint(1)\n```\n```python\nprint(2)\n```", "1\n2"),
        ("<PYTHON>x = 1</PYTHON>", NO_OUTPUT),
        (call(code="print(input())", stdin="own"), "own"),
        ("```python\nimport sys; print('out'); print('err', file=sys.stderr); sys.exit(3)\n```", "out\nerr"),
        ("```python\nimport sys; print('out'); sys.exit(3)\n```", "out\nExit code: 3"),
        ("```python\nimport os; os.kill(os.getpid(), 11)\n```", "Execution was ended by signal 11 (SIGSEGV)."),
        ("```python\nwhile True: pass\n```", "Execution timed out: it ran longer than 1 seconds."),
    ],
)
async def test_programs(tool: SandboxFusionTool, action: str, answer: str) -> None:
    [result] = await results(tool, action)
    assert result.text == answer
    assert result.error == ("Exe" in answer or "err" in answer or "Exit" in answer)


async def test_the_memory_limit_is_sent(tool: SandboxFusionTool) -> None:
    assert "MemoryError" in await text(tool, "```python\nbytearray(1 << 29)\n```")


async def test_a_language_that_is_not_served_is_an_observation(tool: SandboxFusionTool) -> None:
    with pytest.raises(InvalidCall, match="language 'bash' is not served here; send 'python'"):
        await text(tool, "```bash\necho\n```")
    with pytest.raises(InvalidCall, match="'cobol' is not served here"):
        await text(tool, call(language="cobol", code="x"))


async def test_it_does_not_start_without_its_server_or_its_key(
    run_code_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartError, match="language 'go' is not served here"):
        await SandboxFusionTool(url=run_code_url, api_key="s3cret", languages=("go",)).start()
    with pytest.raises(StartError, match=r"HTTP 401.*api_key"):
        await SandboxFusionTool(url=run_code_url).start()
    monkeypatch.setenv(URL_VARIABLE, "http://127.0.0.1:9")
    with pytest.raises(StartError, match=r"no connection.*url is 'http://127.0.0.1:9'"):
        await SandboxFusionTool().start()


def answer_of(**fields: object) -> bytes:
    stage = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "", "stderr": ""}
    found = {name: {**stage, **value} for name, value in fields.items() if isinstance(value, dict)}
    return json.dumps({"status": "Failed", "message": "", **fields, **found}).encode()


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (
            answer_of(compile_result={"return_code": 1, "stderr": "main.cpp:1: error"}),
            "main.cpp:1: error\nCompilation failed with exit code 1.",
        ),
        (
            answer_of(compile_result={"status": "TimeLimitExceeded", "return_code": None}),
            "Compilation timed out: it ran longer than 10 seconds.",
        ),
        (answer_of(status="Success", compile_result={"stderr": "warning"}, run_result={"stdout": "42\n"}), "42"),
        (
            answer_of(compile_result={}, run_result={"return_code": -9, "stdout": "a", "stderr": "b"}),
            "a\nb\nExecution was ended by signal 9 (SIGKILL).",
        ),
    ],
)
async def test_compiled_languages(odd: OddService, body: bytes, answer: str) -> None:
    tool = SandboxFusionTool(url=odd.url)
    odd.body = body
    try:
        assert await text(tool, "```c++\nint main() {}\n```") == answer
    finally:
        await tool.close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (answer_of(status="SandboxError", message="no cgroup"), "did not run the program: no cgroup"),
        (answer_of(), "an answer of another form than SandboxFusion's"),
        (b'{"status": "Odd"}', "an answer of another form than SandboxFusion's"),
    ],
)
async def test_what_the_service_does_wrong_is_a_fault(odd: OddService, body: bytes, words: str) -> None:
    tool = SandboxFusionTool(url=odd.url)
    odd.body = body
    try:
        with pytest.raises(ToolFault, match=words) as caught:
            await text(tool, "```java\nclass A {}\n```")
        assert (caught.value.kind, caught.value.retryable) == (FaultKind.SANDBOX, True)
    finally:
        await tool.close()
