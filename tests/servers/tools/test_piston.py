"""Against a stand-in of Piston's API; what it runs, it runs in the real sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from piston_service import RUNTIMES, OddService, PistonService

from tests.servers.tools.actions import results, text
from verl_tool.errors import ConfigError, StartError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.servers.tools import tool_class
from verl_tool.servers.tools._programs import NO_OUTPUT
from verl_tool.servers.tools.base import InvalidCall
from verl_tool.servers.tools.piston import PistonTool

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[PistonService]:
    async with PistonService() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tool(service: PistonService) -> AsyncIterator[PistonTool]:
    made = PistonTool(url=service.url, timeout_seconds=1, max_concurrent=2, max_output_length=300)
    await made.start()
    yield made
    await made.close()


def call(**arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': 'piston', 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("action", PistonTool.example_actions)
async def test_every_example_action_is_answered(tool: PistonTool, action: str) -> None:
    assert await text(tool, action) == "2"


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("```bash\necho $((6 * 7))\n```", "42"),
        ("```sh\necho 1; exit 3\n```", "1\nExit code: 3"),
        ("<bash>kill -SEGV $$</bash>", "Exit code: 245"),
        ("```python\nx = 1\n```", NO_OUTPUT),
        ("```py\nimport os; os.kill(os.getpid(), 11)\n```", "Execution was ended by signal SIGSEGV."),
        ("```python\nx = 20\n```\nand\n```python\nprint(x + 1)\n```", "21"),
        ("<PYTHON>print(3)</PYTHON>", "3"),
        ("<tool>print(4)</tool>", "4"),
        ("```c++\nbrewed\n```", "brewed"),
        ("```c++\nFAIL\n```", "1: error: FAIL\nCompilation failed with exit code 1."),
        (call(language="brew", code="x"), "x"),
        (call(language="py3", code="print(5)"), "5"),
        (call(code="print(input())", stdin="own"), "own"),
        (call(language="python", code="import sys; print(sys.argv[1:])", args=["a", "b"]), "['a', 'b']"),
        (call(language="python", version="3.12.0", code="print(6)"), "6"),
        (
            call(
                language="python",
                files=[{"name": "a.py", "content": "import b\nprint(b.x)"}, {"name": "b.py", "content": "x = 7"}],
            ),
            "7",
        ),
        (
            '<piston>{"language": "sh", "args": ["8"], "files": [{"name": "a.sh", "content": "echo $1"}]}</piston>',
            "8",
        ),
        (
            "<piston>\n<language>python</language>\n<args>x y</args>\n<stdin>9</stdin>\n"
            '<file name="m.py">\nimport sys\nprint(sys.argv[2], input())\n</file>\n</piston>',
            "y 9",
        ),
        ("<piston>print(10)</piston>", "10"),
    ],
)
async def test_languages_and_forms(tool: PistonTool, action: str, answer: str) -> None:
    assert await text(tool, action) == answer


async def test_blocks_of_two_languages_are_two_programs(tool: PistonTool) -> None:
    both = await results(tool, "```python\nprint(1)\n```\n```bash\necho 2\n```\n```bash\necho 3\n```")
    assert [result.text for result in both] == ["1", "2\n3"]
    twice = await results(tool, PistonTool.example_actions[-1] * 2)
    assert [result.text for result in twice] == ["2", "2"]


async def test_what_the_program_does_wrong_is_an_observation(tool: PistonTool) -> None:
    [late] = await results(tool, "```python\nprint('on', flush=True)\nwhile True: pass\n```")
    assert late.text == "on\nExecution timed out: it ran longer than 1 seconds."
    assert (late.error, late.metrics["timed_out"]) == (True, 1.0)
    [raised] = await results(tool, "```python\n1 / 0\n```")
    assert raised.text.endswith("ZeroDivisionError: division by zero")
    [long] = await results(tool, "```python\nprint('a' * 100_000)\n```")
    assert long.text.endswith("Execution was ended: it wrote more than the server keeps.")
    assert len(long.text) < 500
    [right] = await results(tool, "```python\nprint(1)\n```")
    assert (right.error, right.metrics["error"]) == (False, 0.0)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("```rust\nfn main() {}\n```", "'rust' is not served here; known: bash, brew, python"),
        (call(language="cobol", code="x"), "'cobol' is not served here"),
        (call(language="python", version="2.7", code="x"), "version '2.7' of python is not served here"),
        (call(language="python", files=[]), "files must be a list"),
        (call(language="python", files=[{"name": "a"}]), "a text as content"),
        (call(language="python", files=[{"name": "../a", "content": ""}]), "without a folder"),
        (call(language="python", files=[{"name": "..", "content": ""}]), "without a folder"),
        (call(language="python", code="x", args=[1]), "args must be a list of texts"),
        (call(language="python", code="x", args=["a\0"]), "args must be a list of texts"),
    ],
)
async def test_what_the_model_asks_wrongly_it_is_told(tool: PistonTool, action: str, words: str) -> None:
    with pytest.raises(InvalidCall, match=words):
        await text(tool, action)


async def test_no_more_programs_are_sent_at_once_than_the_options_say(tool: PistonTool, service: PistonService) -> None:
    program = "```python\nimport time\ntime.sleep(0.3)\nprint({})\n```"
    answers = await asyncio.gather(*(text(tool, program.format(i)) for i in range(6)))
    assert answers == [str(i) for i in range(6)]
    assert service.most_at_once == 2
    assert service.requests[-1]["run_timeout"] == 1000


async def test_text_that_is_no_unicode_harms_no_service(tool: PistonTool, service: PistonService) -> None:
    assert await text(tool, "```python\nprint(1) # \ud800\n```") == "1"
    assert service.requests[-1]["files"] == [{"content": "print(1) # ?"}]


async def test_a_fence_of_a_language_that_is_not_listed_is_no_call(tool: PistonTool) -> None:
    assert tool.recognise("```json\n{}\n```") == []
    assert len(PistonTool(languages=("haskell",)).recognise("<haskell>x</haskell>```hs\nx\n```")) == 2
    assert tool_class("python").name == "python_code"


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:2000", "http://h:2000/api/v2"),
        ("http://h/", "http://h/api/v2"),
        ("http://h/api/v2/", "http://h/api/v2"),
        ("https://h/api/v2/piston/execute", "https://h/api/v2/piston"),
    ],
)
async def test_addresses(url: str, base: str) -> None:
    assert PistonTool(url=url).service.url == base


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "localhost:2000"}, "give an address such as"),
        ({"url": "http://h:port"}, "give an address such as"),
        ({"url": "http://me:secret@h"}, "user name or password"),
        ({"restricted_functions": ["eval"]}, "cannot enforce a policy"),
        ({"languages": []}, "at least 1 item"),
    ],
)
async def test_wrong_options_are_refused_before_the_start(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        PistonTool(**options)
    assert "secret" not in str(caught.value)


async def test_it_does_not_start_without_its_server_or_with_a_limit_above_the_servers(service: PistonService) -> None:
    with pytest.raises(
        StartError, match=r"cannot start: unreachable: Piston at http://127.0.0.1:9/api/v2: no conn.*url"
    ):
        await PistonTool(url="http://127.0.0.1:9").start()
    with pytest.raises(StartError, match="run_timeout cannot exceed the configured limit of 3000"):
        await PistonTool(url=service.url, timeout=5).start()


@pytest_asyncio.fixture(loop_scope="module")
async def odd() -> AsyncIterator[OddService]:
    async with OddService() as made:
        yield made


RUN = {"run": {"stdout": "", "stderr": "", "code": None, "signal": None, "status": "XX", "message": "no box"}}


@pytest.mark.parametrize(
    ("answer", "kind", "retryable", "words"),
    [
        ({"status": 500}, FaultKind.SANDBOX, True, "HTTP 500"),
        ({"status": 502, "body": b"proxy"}, FaultKind.SANDBOX, True, "HTTP 502: proxy"),
        ({"status": 503}, FaultKind.OVERLOADED, True, "HTTP 503"),
        ({"status": 429}, FaultKind.OVERLOADED, True, "HTTP 429"),
        ({"status": 401}, FaultKind.MISCONFIGURED, False, "the options url and api_key"),
        ({"status": 404}, FaultKind.MISCONFIGURED, False, "the options url and api_key"),
        ({"status": 302, "headers": {"location": "http://127.0.0.1:9/"}}, FaultKind.MISCONFIGURED, False, "redirects"),
        ({"status": 400, "body": b'{"message": "no"}'}, FaultKind.BAD_REQUEST, False, '{"message": "no"}'),
        ({"body": b"<html>"}, FaultKind.SANDBOX, True, "an answer of another form than Piston's: <html>"),
        ({"body": b"[" * 100_000}, FaultKind.SANDBOX, True, "another form"),
        ({"body": b'{"run": 1}'}, FaultKind.SANDBOX, True, "another form"),
        ({"body": b"{}"}, FaultKind.SANDBOX, True, "another form"),
        ({"body": json.dumps(RUN).encode()}, FaultKind.SANDBOX, True, "no box"),
        ({"wait_seconds": 5.0}, FaultKind.TIMEOUT, False, "no answer within 0.3 s"),
        ({"closes": True}, FaultKind.UNREACHABLE, True, "the connection broke"),
    ],
)
async def test_what_the_service_does_wrong_is_a_fault(
    odd: OddService, answer: dict[str, object], kind: FaultKind, retryable: bool, words: str
) -> None:
    limits = {"timeout_seconds": 0.1, "compile_seconds": 0.1, "grace_seconds": 0.1, "api_key": "the-key"}
    tool = PistonTool(url=odd.url, **limits)
    tool._names = {"python": "python"}
    for name, value in answer.items():
        setattr(odd, name, value)
    try:
        with pytest.raises(ToolFault) as caught:
            await text(tool, "<python>1</python>")
    finally:
        await tool.close()
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)
    assert words in caught.value.message
    assert "the-key" not in caught.value.message
    assert len(odd.seen) == 1, "no redirect is followed, and nothing is sent again"
    assert odd.seen[0].headers["authorization"] == "Bearer the-key"


async def test_an_answer_that_is_too_long_is_the_programs_doing(odd: OddService) -> None:
    tool = PistonTool(url=odd.url)
    tool._names = {"python": "python"}
    odd.body = b" " * (17 << 20)
    try:
        [result] = await results(tool, "<python>1</python>")
    finally:
        await tool.close()
    assert result.error
    assert result.text == "The program wrote more than the 4 MB that an answer may have."


async def test_no_place_in_time_is_overload(odd: OddService) -> None:
    odd.wait_seconds = 2.0
    tool = PistonTool(url=odd.url, max_concurrent=1, queue_seconds=0.1)
    tool._names = {"python": "python"}
    first = asyncio.create_task(text(tool, "<python>1</python>"))
    await asyncio.sleep(0.05)
    try:
        with pytest.raises(ToolFault, match="no place for a request to Piston within") as caught:
            await text(tool, "<python>1</python>")
        assert (caught.value.kind, caught.value.retryable) == (FaultKind.OVERLOADED, True)
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await tool.close()


async def test_the_stand_in_lists_what_the_documentation_has() -> None:
    assert all(set(each) == {"language", "version", "aliases"} for each in RUNTIMES)
