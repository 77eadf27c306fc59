"""Agents that call the tool server over MCP, through the gateway: calls, rewards and faults are the rollout's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket
from typing import Any

import aiohttp
import pytest
from agent_sessions import WritingGenerator
from live_server import LiveServer, LiveServers
from real_templates import TemplateTokenizer
from template_families import QWEN
from toy_tools import Ledger, Puppet, until

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.trajectory import Excluded, StopReason
from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError
from verl_tool.formats import format_by_name
from verl_tool.gateway.agent_program import AgentProgram, run_program
from verl_tool.gateway.gateway_app import Gateway
from verl_tool.gateway.mcp_tools import GatewayTools
from verl_tool.gateway.presets import MCP_PRESETS
from verl_tool.gateway.session import AgentSession, SessionModel
from verl_tool.protocol import FaultKind
from verl_tool.sandbox.isolation.levels import Level, strongest
from verl_tool.sandbox.sandboxed_service import ServiceSandbox
from verl_tool.servers.cluster.direct_server import DirectServer
from verl_tool.servers.tools import load_tools

pytestmark = pytest.mark.slow

INSTALL = Path(os.environ.get("VERL_TOOL_AGENTS", Path(__file__).parents[2] / ".agents"))
STARTED = {"claude_code": "claude", "codex": "codex", "opencode": "opencode"}
NAMED = {"claude_code": "mcp__tools__{}", "codex": "{}", "opencode": "tools_{}"}
"""What each agent calls a tool of the MCP server."""
TOKENIZER = TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN)
needs_sandbox = pytest.mark.skipif(
    sys.platform != "linux" or strongest().level is not Level.full, reason="no sandbox on this machine"
)


class Fixture:
    """A gateway on a Unix socket, in front of a real tool server."""

    def __init__(self, folder: Path, server: LiveServer, client: ToolClient) -> None:
        self.server, self.socket = server, folder / "gateway.sock"
        self.generator = WritingGenerator(TOKENIZER)
        model = SessionModel.create(self.generator, TOKENIZER, [format_by_name("hermes")], 1 << 20)
        self.gateway = Gateway(
            model, tools=GatewayTools(client, EpisodeOptions(enable_mtrl=True, tool_call_timeout=20.0))
        )

    async def post(self, session: AgentSession, method: str, **params: Any) -> tuple[int, Any]:
        """One message of MCP, as an agent sends it."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        url = f"http://gateway/sessions/{session.id}/mcp"
        connector = aiohttp.UnixConnector(str(self.socket))
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.post(url, json=body, headers=headers) as response,
        ):
            return response.status, json.loads(await response.read())

    async def call(self, session: AgentSession, name: str, **arguments: Any) -> Any:
        """The result or the error of a call."""
        status, answer = await self.post(session, "tools/call", name=name, arguments=arguments)
        assert status == 200 or "error" in answer
        return answer.get("result") or answer["error"]

    async def run(self, program: AgentProgram, task: str = "", session: AgentSession | None = None) -> Any:
        """The program's result and the rollout."""
        session, sandbox = session or self.gateway.open_session(), ServiceSandbox(program.limits)
        try:
            result = await run_program(sandbox, program, session, self.socket, task)
        finally:
            rollout = await session.finish(1.0)
            await sandbox.close()
        return result, rollout


@contextlib.asynccontextmanager
async def serve(folder: Path, servers: LiveServers, *tools: Any) -> AsyncIterator[Fixture]:
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    server = await servers.start(tools)
    async with ToolClient(server.url, timeout=15.0, max_retries=1, retry_delay=0.01) as client:
        fixture = Fixture(folder, server, client)
        listener = Socket(AF_UNIX)
        listener.bind(str(fixture.socket))
        fixture.socket.chmod(0o666)
        listener.listen()
        direct = DirectServer(listener)
        await direct.open(fixture.gateway.app(for_agents=True))
        yield fixture
        await direct.close(1.0)


CLIENT = """
import asyncio, os, sys
from mcp import Client

async def main():
    async with Client(os.environ["MCP_URL"]) as client:
        print(*sorted(tool.name for tool in (await client.list_tools()).tools))
        print((await client.call_tool("python_code", {"code": "print(6 * 7)"})).content[0].text.strip())
        await client.call_tool("ipython_code", {"code": "x = 42"})
        code = client.call_tool("ipython_code", {"code": "print(x + 1)"})
        answers = await asyncio.gather(code, client.call_tool("puppet", {"input": "reward 0.5"}))
        print(answers[0].content[0].text.strip(), answers[1].meta["verl-tool/reward"])

assert os.environ["MCP_URL"] == sys.argv[1]
asyncio.run(main())
"""


@needs_sandbox
async def test_a_program_calls_tools_in_its_trajectory(tmp_path: Path, servers: LiveServers) -> None:
    async with serve(tmp_path, servers, *load_tools("python_code,ipython_code"), Puppet()) as fixture:
        session = fixture.gateway.open_session()
        program = AgentProgram(command=("python", "-c", CLIENT, "{mcp_url}"), mcp=True, seconds=60)
        result, rollout = await fixture.run(program, session=session)
        assert (result.exit_code, result.output) == (0, "ipython_code puppet python_code\n42\n43 0.5\n")
        assert [call.step for call in rollout.calls] == [0, 1, 2, 3]
        assert [call.names[0] for call in rollout.calls] == ["python_code", "ipython_code", "ipython_code", "puppet"]
        assert (rollout.tool_rewards, rollout.turn_calls, rollout.fault) == ([0.5], (), None)
        assert not fixture.server.app.toolset.knows(session.id)


@needs_sandbox
@pytest.mark.timeout(240)
@pytest.mark.parametrize("preset", sorted(MCP_PRESETS))
async def test_a_real_agent_calls_a_tool(preset: str, tmp_path: Path, servers: LiveServers) -> None:
    if not (INSTALL / "node_modules" / ".bin" / STARTED[preset]).exists():
        pytest.skip(f"{preset} is not installed in {INSTALL}; run bash scripts/install_agents.sh")
    [calculator] = load_tools("calculator")
    async with serve(tmp_path, servers, calculator) as fixture:
        name = NAMED[preset].format("calculator")
        written = json.dumps({"name": name, "arguments": {"expression": "6*7"}})
        turns = [f"<tool_call>\n{written}\n</tool_call><|im_end|>", "It is 42.<|im_end|>"]
        generator = fixture.generator
        generator.turns[:] = turns
        generate = generator.generate

        async def with_title(prompt_ids: list[int], params: dict[str, Any], request_id: str) -> Any:
            if "<tools>" not in TOKENIZER.decode(prompt_ids):
                generator.turns.insert(0, "A title<|im_end|>")
            return await generate(prompt_ids, params, request_id)

        generator.generate = with_title  # type: ignore[method-assign]
        program = AgentProgram(preset=preset, install=str(INSTALL), mcp=True, seconds=120).resolve()
        result, rollout = await fixture.run(program, "What is 6 * 7?")
        assert [(call.names, call.observation) for call in rollout.calls] == [(("calculator",), "42")], result.output
        assert (len(rollout.rows), rollout.num_turns, generator.turns) == (1, 2, [])
        assert "42" in TOKENIZER.decode(generator.prompts[-1])


async def test_only_tools_of_the_row_and_of_the_server_are_there(tmp_path: Path, servers: LiveServers) -> None:
    [calculator] = load_tools("calculator")
    async with serve(tmp_path, servers, calculator, Puppet()) as fixture:
        session = fixture.gateway.open_session(listed_tools=["calculator"])
        _, listed = await fixture.post(session, "tools/list")
        assert [tool["name"] for tool in listed["result"]["tools"]] == ["calculator"]
        error = await fixture.call(session, "puppet", input="say x")
        assert error["message"] == "tool 'puppet' is unknown; known: calculator"
        rollout = await session.finish()
        assert (rollout.calls, rollout.fault) == ((), None)


async def test_a_call_whose_agent_leaves_is_recorded(tmp_path: Path, servers: LiveServers) -> None:
    async with serve(tmp_path, servers, Puppet()) as fixture:
        session = fixture.gateway.open_session()
        call = asyncio.ensure_future(fixture.call(session, "puppet", input="sleep 1"))
        await until(lambda: session.tools is not None and bool(session.tools._running))
        call.cancel()
        answer = await fixture.call(session, "puppet", input="say after")
        assert answer["content"][0]["text"] == "after"
        rollout = await session.finish()
        assert [(call.step, call.observation) for call in rollout.calls][1:] == [(1, "after")]


async def test_a_finished_session_frees_what_a_running_call_holds(tmp_path: Path, servers: LiveServers) -> None:
    async with serve(tmp_path, servers, ledger := Ledger()) as fixture:
        session = fixture.gateway.open_session()
        await fixture.call(session, "ledger", input="bread")
        call = asyncio.ensure_future(fixture.call(session, "ledger", input="milk@3"))
        await until(lambda: session.tools is not None and bool(session.tools._running))
        assert (await session.finish()).fault is None
        assert ledger.closed == []
        await until(lambda: ledger.closed == [["bread", "milk"]])
        status, answer = await fixture.post(session, "tools/list")
        assert (status, answer["error"]["message"]) == (404, "this session is finished")
        call.cancel()


async def test_nothing_is_called_after_the_end_of_the_task(tmp_path: Path, servers: LiveServers) -> None:
    async with serve(tmp_path, servers, Puppet()) as fixture:
        session = fixture.gateway.open_session()
        await fixture.call(session, "puppet", input="end over")
        answer = await fixture.call(session, "puppet", input="say x")
        assert (answer["isError"], "ended the task" in answer["content"][0]["text"]) == (True, True)
        rollout = await session.finish()
        assert [call.done for call in rollout.calls] == [True]


async def test_a_tool_server_that_fails_is_the_rollouts_fault(tmp_path: Path, servers: LiveServers) -> None:
    async with serve(tmp_path, servers, Puppet()) as fixture:
        session = fixture.gateway.open_session()
        await fixture.call(session, "puppet", input="say x")
        await fixture.server.stop()
        error = await fixture.call(session, "puppet", input="say y")
        assert error["data"]["kind"] == FaultKind.UNREACHABLE.value
        rollout = await session.finish(1.0)
        assert (rollout.excluded, rollout.fault is not None and rollout.fault.kind) == (
            Excluded.FAULT,
            FaultKind.UNREACHABLE,
        )


@pytest.mark.parametrize(
    ("requests", "aborted", "stop", "excluded"),
    [
        (1, False, StopReason.FAULT, None),
        (0, False, StopReason.FAULT, Excluded.FAULT),  # the program's own doing
        (1, True, StopReason.ABORTED, Excluded.ABORTED),
    ],
)
async def test_a_fault_that_a_call_of_the_model_may_have_caused_counts(
    tmp_path: Path, servers: LiveServers, requests: int, aborted: bool, stop: StopReason, excluded: Excluded | None
) -> None:
    async with serve(tmp_path, servers, Puppet()) as fixture:
        session = fixture.gateway.open_session()
        session.num_requests = requests
        error = await fixture.call(session, "puppet", input="crash it")
        assert error["data"]["kind"] == FaultKind.TOOL_CRASHED.value
        session.aborted = aborted
        rollout = await session.finish()
        assert (rollout.stop, rollout.excluded) == (stop, excluded)


async def test_a_gateway_without_a_tool_server_says_so(tmp_path: Path, servers: LiveServers) -> None:
    async with serve(tmp_path, servers, Puppet()) as fixture:
        fixture.gateway.tools = None
        status, answer = await fixture.post(fixture.gateway.open_session(), "tools/list")
        assert (status, answer["error"]["message"]) == (
            404,
            "this session has no tools; this gateway has no tool server",
        )


def test_an_agent_that_does_not_speak_mcp_is_refused() -> None:
    with pytest.raises(ConfigError, match="preset pi is not configured for MCP"):
        AgentProgram(preset="pi", install="/", mcp=True).resolve()


CALLER = """
import asyncio, json, os, urllib.request
from mcp import Client

async def main():
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    await asyncio.to_thread(urllib.request.urlopen, request, timeout=20)
    async with Client(os.environ["MCP_URL"]) as client:
        for verb in ("extra color", "reward 0.5"):
            await client.call_tool("puppet", {"input": verb})

asyncio.run(main())
"""


@needs_sandbox
async def test_the_loop_gives_calls_and_rewards_to_verl(servers: LiveServers) -> None:
    pytest.importorskip("verl")
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl_loop import ScriptedEngine, composed, make_tokenizer

    from verl_tool.gateway.verl_agent_loop import make_agent_loop

    server = await servers.start([Puppet()])
    config = composed(
        *("data.max_response_length=64", "trainer.use_v1=true", "actor_rollout_ref.agent.tool_schemas=none"),
        *(f"actor_rollout_ref.agent.tool_server_url={server.url}", "gateway.program.mcp=true"),
        *("gateway.program.seconds=60", "actor_rollout_ref.agent.enable_mtrl=true"),
    )
    config.gateway.program.command = ["python", "-c", CALLER]
    tokenizer = make_tokenizer()
    made = make_agent_loop(
        DictConfigWrap(config),
        server_manager=ScriptedEngine(tokenizer, "fine"),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
    )
    row = {"tools_kwargs": {"color": "red"}, "uid": "a", "session_id": 0, "data_source": "d"}
    output = await made.run({}, raw_prompt=[{"role": "user", "content": "go"}], index=3, **row)
    fields = output.extra_fields
    assert fields["trajectory"].fault is None, fields["trajectory"].extra
    assert [call.observation for call in fields["trajectory"].calls] == ["red", "0.5"]
    assert fields["tool_rewards"] == [0.5]
    assert tokenizer.decode(output.response_ids) == "fine"
    await made._worker.tools.close()


def test_tools_over_mcp_need_the_tool_server() -> None:
    pytest.importorskip("verl")
    from verl_loop import composed

    from verl_tool.gateway.settings import GatewaySettings

    config = composed(
        *("trainer.use_v1=true", "actor_rollout_ref.agent.enable_agent=false", "gateway.program.mcp=true"),
        "gateway.program.command=[x]",
    )
    with pytest.raises(ConfigError, match="enable_agent"):
        GatewaySettings.of_config(config)
