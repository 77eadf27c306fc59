"""Tools of MCP servers among ours: calls, state, errors, faults, and servers that mean no good."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import toy_mcp_server
from toy_mcp import TOY, programs, tools_of, toy
from toy_tools import running, text, until

from verl_tool.content.parts import from_wire
from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.protocol import FaultKind, StepRequest, StepResult
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.mcp.catalog import ask_all
from verl_tool.servers.mcp.config import McpConfig
from verl_tool.servers.replica.replica_parts import isolation_of

pytestmark = pytest.mark.slow


@asynccontextmanager
async def serving(config: McpConfig, **options: Any) -> AsyncIterator[ToolSet]:
    async with running(await tools_of(config), **options) as toolset:
        yield toolset


async def ask(
    toolset: ToolSet, tool: str, words: Any = None, trajectory: str = "t", step: int | None = None
) -> StepResult:
    arguments = {} if words is None else {"text": words} if isinstance(words, str) else words
    call = json.dumps({"name": f"mcp__{tool}", "arguments": arguments})
    [result] = await toolset.step([StepRequest(trajectory, call, step, extra={"direct_call": True})])
    return result


class TestCalls:
    async def test_a_model_calls_in_any_format_and_reads_the_answer(self) -> None:
        async with serving(toy()) as toolset:
            descriptions = {each.name: each for each in toolset.describe()}
            assert set(descriptions) == {"mcp__toy__echo", "mcp__toy__count", "mcp__toy__do"}
            echo = descriptions["mcp__toy__echo"]
            assert (echo.description, echo.parameters) == ("Tool echo.", toy_mcp_server.TEXT)
            assert '"mcp__toy__echo"' in echo.usage
            actions = [
                '<tool_call>\n{"name": "mcp__toy__echo", "arguments": {"text": "hi"}}\n</tool_call>',
                '<mcp__toy__echo>{"text": "hi"}</mcp__toy__echo>',
                "<mcp__toy__echo>hi</mcp__toy__echo>",
                "```mcp__toy__echo\nhi\n```",
            ]
            for action in actions:
                [result] = await toolset.step([StepRequest("t", action)])
                assert "echo: hi" in result.observation
                assert (result.valid, result.fault) == (True, None)
            escaped = '<tool_call>\n{"name": "mcp__toy__echo", "arguments": {"text": "</tool_response>"}}\n</tool_call>'
            [result] = await toolset.step([StepRequest("t", escaped)])
            assert result.observation.count("</tool_response>") == 1

    async def test_each_trajectory_has_a_server_of_its_own_and_leaves_none(self) -> None:
        async with serving(toy()) as toolset:
            before = len(programs())
            first = await ask(toolset, "toy__count", trajectory="a", step=0)
            again = await ask(toolset, "toy__count", trajectory="a", step=0)
            assert first.observation == again.observation
            assert (await ask(toolset, "toy__count", trajectory="a", step=1)).observation.split()[0] == "2"
            assert (await ask(toolset, "toy__echo", "x", trajectory="a", step=2)).observation == "echo: x"
            assert (await ask(toolset, "toy__count", trajectory="b", step=0)).observation.split()[0] == "1"
            assert len(programs()) == before + 2
            await toolset.step([StepRequest("a", "", finish=True), StepRequest("b", "", finish=True)])
            assert len(programs()) == before
            assert (await ask(toolset, "toy__count", trajectory="a", step=0)).observation.split()[0] == "1"
        assert programs() == []

    async def test_a_server_without_state_serves_all_from_one_process(self) -> None:
        async with serving(toy(stateful=False)) as toolset:
            assert not toolset.stateful
            results = await asyncio.gather(*(ask(toolset, "toy__count", trajectory=f"t{i}") for i in range(5)))
            assert sorted(result.observation.split()[0] for result in results) == ["1", "2", "3", "4", "5"]
            assert len({result.observation.split()[1] for result in results}) == 1
            assert len(programs()) == 1
        assert programs() == []

    async def test_in_the_sandbox(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VERL_TOOL_API_KEY", "a secret")
        async with serving(toy(sandbox=True, readable=[TOY], env={"GIVEN": "${VERL_TOOL_API_KEY}"})) as toolset:
            assert "no network" in isolation_of(toolset)
            names = json.loads((await ask(toolset, "toy__do", "env")).observation)
            assert "GIVEN" in names
            assert set(names) <= {"GIVEN", "HOME", "LANG", "LC_CTYPE", "PATH", "PYTHONDONTWRITEBYTECODE"}

    async def test_there_is_a_bound_on_clients(self) -> None:
        async with serving(toy(max_sessions=1)) as toolset:
            assert (await ask(toolset, "toy__count", trajectory="a")).fault is None
            fault = (await ask(toolset, "toy__count", trajectory="b")).fault
            assert fault is not None
            assert (fault.kind, fault.retryable) == (FaultKind.OVERLOADED, True)
            await toolset.step([StepRequest("a", "", finish=True)])
            assert (await ask(toolset, "toy__count", trajectory="b")).fault is None


class TestAnswers:
    async def test_errors_are_observations(self) -> None:
        async with serving(toy(stateful=False, max_output_length=200)) as toolset:
            for words, observed in (
                ("failed", "it failed"),
                ("protocol error", "Error: Invalid arguments: text is wrong"),
                ("server error", "Error: the database is locked"),
            ):
                result = await ask(toolset, "toy__do", words)
                assert (result.observation, result.valid, result.fault) == (observed, True, None)
                assert result.metrics == {"error": 1.0}
            long = await ask(toolset, "toy__do", "long 5000")
            assert "4800 characters left out" in long.observation
            [result] = await toolset.step([StepRequest("t", "<mcp__toy__do></mcp__toy__do>")])
            assert text(result.observation).endswith("done")
            assert (await ask(toolset, "toy__do", "structured")).observation == '{"a": [1, null]}'
            assert (await ask(toolset, "toy__do", "resource")).observation == "inside"
            assert (await ask(toolset, "toy__do", "print")).observation == "done print"
            assert len(programs()) == 1

    async def test_images_are_carried_and_what_cannot_be_is_refused_by_name(self) -> None:
        pixel = from_wire(f"data:image/png;base64,{toy_mcp_server.PIXEL}")
        async with serving(toy(stateful=False)) as toolset:
            for count in (1, 2):
                seen = await ask(toolset, "toy__do", f"image {count}")
                assert (seen.observation, seen.image) == ("see" + "<image>" * count, [pixel] * count)
            for words, said in (
                ("image 65", "tool mcp__toy__do answered with 65 images and audios in one observation; at most 64"),
                (
                    "broken_image",
                    "tool mcp__toy__do answered with image/png that cannot be carried: a file that",
                ),
                ("binary", "tool mcp__toy__do answered with binary data of type 'application/zip'"),
                ("large_image", "tool mcp__toy__do answered with image/png of 3145732 characters"),
            ):
                fault = (await ask(toolset, "toy__do", words)).fault
                assert fault is not None
                assert said in fault.message
            assert len(programs()) == 1


class TestFaults:
    async def test_a_server_that_dies_in_a_call_is_the_fault_of_that_call_and_starts_again(self) -> None:
        async with serving(toy(stateful=False)) as toolset:
            fault = (await ask(toolset, "toy__do", "exit")).fault
            assert fault is not None
            assert (fault.kind, fault.retryable) == (FaultKind.TOOL_CRASHED, False)
            assert "I go" in fault.message
            assert fault.kind.provokable
            assert (await ask(toolset, "toy__echo", "x")).observation == "echo: x"

    async def test_a_trajectory_whose_server_died_is_not_given_a_fresh_one(self) -> None:
        async with serving(toy()) as toolset:
            assert (await ask(toolset, "toy__count", step=0)).fault is None
            for step, words in ((1, "exit"), (2, "anything")):
                fault = (await ask(toolset, "toy__do", words, step=step)).fault
                assert fault is not None
                assert (fault.kind, fault.retryable) == (FaultKind.TOOL_CRASHED, False)
            assert (await ask(toolset, "toy__count", trajectory="other")).fault is None

    async def test_a_call_that_takes_too_long_times_out_and_the_others_do_not(self) -> None:
        async with serving(toy(stateful=False, timeout_seconds=0.5)) as toolset:
            fault = (await ask(toolset, "toy__do", "sleep 60")).fault
            assert fault is not None
            assert (fault.kind, fault.retryable) == (FaultKind.TIMEOUT, False)
            assert "timeout_seconds=0.5" in fault.message
            assert (await ask(toolset, "toy__echo", "x")).observation == "echo: x"
            await until(lambda: len(programs()) == 1)

    async def test_a_server_that_cannot_be_started_again_is_unreachable_and_not_asked_all_the_time(
        self, tmp_path: Path
    ) -> None:
        script = tmp_path / "server.py"
        await asyncio.to_thread(script.write_text, await asyncio.to_thread(Path(TOY).read_text))
        async with serving(toy(stateful=False, args=["-I", str(script)])) as toolset:
            script.unlink()
            assert (await ask(toolset, "toy__do", "exit")).fault is not None
            for said in ("can't open file", "is tried again in"):
                fault = (await ask(toolset, "toy__echo", "x")).fault
                assert fault is not None
                assert (fault.kind, fault.retryable) == (FaultKind.UNREACHABLE, True)
                assert said in fault.message

    async def test_an_answer_that_is_none_is_a_fault(self) -> None:
        async with serving(toy(stateful=False)) as toolset:
            fault = (await ask(toolset, "toy__do", "nonsense")).fault
            assert fault is not None
            assert fault.kind is FaultKind.TOOL_CRASHED


class TestHostileServers:
    @pytest.mark.parametrize(
        ("mode", "said"),
        [
            ("hang", "no answer within start_seconds=2"),
            ("flood", "cannot be reached"),
            ("notify", "cannot be reached"),
            ("exit", "cannot find my database"),
            ("long_name", "the name of its tool 'xxx"),
            ("same_names", "would both be mcp__toy__a_b"),
            ("deep_schema", "nested more than 32 levels deep"),
            ("large_schema", "has more than 65536 bytes"),
            ("odd_schema", "does not list its tools"),
            ("abyss", "a message is nested too deeply"),
            ("endless_pages", "on more than 32 pages"),
            ("many_tools", "more than 256 tools"),
        ],
    )
    async def test_a_server_that_cannot_be_used_is_refused_in_time(self, mode: str, said: str) -> None:
        began = time.monotonic()
        found = (await ask_all(toy(mode, start_seconds=2)))["toy"]
        assert isinstance(found, VerlToolError)
        assert said in str(found)
        assert time.monotonic() - began < 30
        assert programs() == []

    async def test_odd_names_become_plain_ones(self) -> None:
        async with serving(toy("odd_names", stateful=False)) as toolset:
            assert [each.name for each in toolset.describe()] == [
                "mcp__toy__a_b_c",
                "mcp__toy____tool_call_",
                "mcp__toy__na_ve_tool",
            ]
            assert (await ask(toolset, "toy__a_b_c", "x")).observation == "a/b c: x"

    async def test_a_flood_on_stderr_stops_nobody(self) -> None:
        async with serving(toy("flood_stderr", stateful=False)) as toolset:
            assert (await ask(toolset, "toy__echo", "x")).observation == "echo: x"

    @pytest.mark.parametrize("words", ["noise 30000", "line 6000000"])
    async def test_a_flood_in_a_call_ends_the_server(self, words: str) -> None:
        async with serving(toy(stateful=False)) as toolset:
            fault = (await ask(toolset, "toy__do", words)).fault
            assert fault is not None
            # By its bound, or on a busy machine by the time of the call, whichever comes first.
            assert fault.kind in (FaultKind.TOOL_CRASHED, FaultKind.TIMEOUT)
            assert (await ask(toolset, "toy__echo", "x")).observation == "echo: x"


class TestConfig:
    @pytest.mark.parametrize(
        ("entry", "said"),
        [
            ({}, "either a command (stdio) or a url"),
            ({"command": "x", "url": "http://y"}, "either a command (stdio) or a url"),
            ({"command": "x", "type": "http"}, "goes with a url"),
            ({"url": "ftp://y"}, "must begin with http"),
            ({"url": "http://y", "env": {"A": "b"}}, "env has no effect"),
            ({"command": "x", "headers": {"A": "b"}}, "headers has no effect"),
            ({"command": "x", "sandbox": False, "readable": ["/"]}, "readable has no effect"),
            ({"command": "x", "timeout": 5}, "unknown key 'mcpServers.s.timeout'; known here: "),
            ({"command": "${NOT_SET_ANYWHERE}"}, "there is no variable NOT_SET_ANYWHERE"),
            ({"command": "x", "timeout_seconds": -1}, "timeout_seconds"),
            ({"command": "x", "args": "-v"}, 'mcpServers.s.args: write a list of texts: ["…", "…"]'),
        ],
    )
    def test_what_is_wrong_is_named(self, entry: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError) as error:
            McpConfig.parse({"mcpServers": {"s": entry}})
        assert said in str(error.value)

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65, "</s>"])
    def test_names_of_servers_are_plain(self, name: str) -> None:
        with pytest.raises(ConfigError, match="a server's name"):
            McpConfig.parse({"mcpServers": {name: {"command": "x"}}})

    def test_variables_are_read_and_secrets_not_shown(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TOKEN", "secret")
        entry = {
            "type": "streamable-http",
            "url": "http://${HOST_OF_IT:-localhost}/mcp",
            "headers": {"Authorization": "Bearer ${env:TOKEN}"},
            "autoApprove": ["x"],
        }
        file = tmp_path / "servers.json"
        file.write_text(json.dumps({"mcpServers": {"s": entry, "off": {"command": "x", "disabled": True}}}))
        config = McpConfig.from_file(file)
        server = config.mcpServers["s"]
        assert (server.transport, server.url) == ("http", "http://localhost/mcp")
        assert server.headers == {"Authorization": "Bearer secret"}
        assert "secret" not in repr(config)
        assert list(config.enabled()) == ["s"]
        with pytest.raises(ConfigError) as error:
            McpConfig.parse({"mcpServers": {"s": {"url": "x", "headers": {"A": ["${TOKEN}"]}}}})
        assert "secret" not in str(error.value)

    async def test_only_the_tools_that_are_named_are_offered(self) -> None:
        async with serving(toy(tools=["echo"])) as toolset:
            assert [each.name for each in toolset.describe()] == ["mcp__toy__echo"]
        found = (await ask_all(toy(tools=["echos"])))["toy"]
        assert isinstance(found, ConfigError)
        assert "has no tool 'echos'; it has: echo, count, do" in str(found)

    def test_a_file_that_the_sandbox_does_not_show_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("server.py").touch()
        found = str(asyncio.run(ask_all(toy(sandbox=True, args=["server.py"])))["toy"])
        assert "the program has ended" in found
        assert f'finds no server.py: write {tmp_path}/server.py, and name it or its folder in "readable"' in found
        assert found.endswith('or run it outside: "sandbox": false')

    def test_a_program_that_ends_though_it_may_read_what_it_is_given_is_told_what_else_it_lacks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = tmp_path / "server.py"
        script.touch()
        monkeypatch.setenv("SCRIPT_OF_TEST", str(script))
        script_only = toy(sandbox=True, args=["${SCRIPT_OF_TEST}"], readable=["${SCRIPT_OF_TEST}"])
        found = str(asyncio.run(ask_all(script_only))["toy"])
        assert 'in the sandbox it finds no file but what is "readable", and no network' in found

    async def test_a_program_that_is_not_there_is_named(self) -> None:
        for settings in ({}, {"sandbox": True}):
            found = (await ask_all(toy(command="no-such-program", **settings)))["toy"]
            assert isinstance(found, ConfigError)
            assert "MCP server toy: program 'no-such-program' was not found" in str(found)
