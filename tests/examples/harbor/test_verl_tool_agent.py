"""The agent for Harbor at a real endpoint with a scripted model. Harbor needs a newer Python than ours, so most tests
have STAND-INS for its classes; with ``VERL_TOOL_HARBOR_PYTHON``, an interpreter that has Harbor runs the agent too."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from atif_schema import check_atif
from live_endpoint import LiveEndpoint, live_endpoint
from script_module import load_script

from verl_tool.agent_loop.trajectory import Trajectory, read_jsonl

pytest.importorskip("openai")

ROOT = Path(__file__).parents[3]
AGENT = ROOT / "examples/harbor/verl_tool_agent.py"
HARBOR = "VERL_TOOL_HARBOR_PYTHON"


class BaseAgentStandIn:
    """STAND-IN for `harbor.agents.base.BaseAgent` of Harbor 0.26."""

    def __init__(self, logs_dir: Path, model_name: str | None = None, **kwargs: Any) -> None:
        assert not kwargs, "options are the agent's own"
        self.logs_dir, self.model_name = logs_dir, model_name

    def _get_env(self, name: str) -> str | None:
        return os.environ.get(name)


def context_stand_in() -> Any:
    """Make a STAND-IN for `harbor.models.agent.context.AgentContext`."""
    return SimpleNamespace(n_input_tokens=None, n_output_tokens=None, rollout_details=None, metadata=None)


class EnvironmentStandIn:
    """STAND-IN for an environment of Harbor, which runs commands on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.limits: list[int] = []

    async def exec(self, command: str, timeout_sec: int) -> Any:
        self.limits.append(timeout_sec)
        process = await asyncio.create_subprocess_shell(command, stdout=-1, stderr=-1, cwd=self.folder)
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_sec)
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        return SimpleNamespace(stdout=stdout.decode(), stderr=stderr.decode(), return_code=process.returncode)


@pytest.fixture
def agent_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The agent's class, over the stand-ins."""
    classes = {
        "harbor.agents.base": {"BaseAgent": BaseAgentStandIn},
        "harbor.agents.capabilities": {"AgentCapabilities": SimpleNamespace},
        "harbor.environments.base": {"BaseEnvironment": EnvironmentStandIn},
        "harbor.models.agent.context": {"AgentContext": SimpleNamespace},
    }
    for name, members in classes.items():
        module = ModuleType(name)
        vars(module).update(members)
        for parent in ("harbor", *(name.rsplit(".", k)[0] for k in range(1, name.count(".")))):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    return load_script("verl_tool_agent_over_stand_ins", AGENT).VerlToolAgent


def call(command: str | None, name: str = "bash") -> str:
    arguments = {} if command is None else {"command": command}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def say(*turns: str) -> Callable[[str], str]:
    """Return the rule of a model that writes these turns, the last one again and again."""
    return lambda text: turns[min(text.count("<tool_call>"), len(turns) - 1)]


@asynccontextmanager
async def serve(*turns: str, **options: Any) -> AsyncIterator[LiveEndpoint]:
    async with live_endpoint(say(*turns), **{"max_model_len": 100_000} | options) as live:
        yield live


async def work(agent_class: Any, live: LiveEndpoint, folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Let the agent work, and return Harbor's context and the trajectory."""
    agent = agent_class(folder, endpoint=f"{live.url}/v1", **options)
    environment, context = EnvironmentStandIn(folder), context_stand_in()
    await agent.setup(environment)
    await agent.run("How warm is it?", environment, context)
    document = json.loads((folder / "trajectory.json").read_text())
    check_atif(document)
    return context, document


def observations(document: dict[str, Any]) -> list[str]:
    steps = document["steps"]
    return [result["content"] for step in steps for result in step.get("observation", {}).get("results", ())]


async def test_commands_of_the_model_run_in_the_environment(agent_class: Any, tmp_path: Path) -> None:
    (tmp_path / "temperature").write_text("21\n")
    async with serve(f"<think>\nI look.\n</think>\n\n{call('cat temperature; exit 3')}", "It is 21.") as live:
        context, document = await work(agent_class, live, tmp_path, session={"sampling": {"logprobs": 0}})
    asked, first, last = document["steps"]
    assert (asked["source"], asked["message"]) == ("user", "How warm is it?")
    assert (first["reasoning_content"], last["message"]) == ("I look.", "It is 21.")
    assert first["tool_calls"][0]["arguments"] == {"command": "cat temperature; exit 3"}
    assert observations(document) == ["21\n\n[exit code 3]"]
    assert document["agent"]["model_name"] == "toy"
    assert context.metadata["stop"] == document["extra"]["stop"] == "answered"
    (record,) = read_jsonl(tmp_path / "record.jsonl")
    check_tokens(document, context, record)


def check_tokens(document: dict[str, Any], context: Any, record: Trajectory) -> None:
    """Check that trajectory and context have the tokens of the record, as sampled."""
    metrics = [step["metrics"] for step in document["steps"] if step["source"] == "agent"]
    sampled = [segment for segment in record.response if segment.generated]
    assert [tuple(each["completion_token_ids"]) for each in metrics] == [segment.tokens for segment in sampled]
    assert [tuple(each["logprobs"]) for each in metrics] == [segment.log_probs for segment in sampled]
    assert metrics[-1]["prompt_token_ids"] == record.prompt_ids + record.response_ids[: -len(sampled[-1].tokens)]
    assert [each["prompt_tokens"] for each in metrics] == [len(each["prompt_token_ids"]) for each in metrics]
    (detail,) = context.rollout_details
    assert detail["completion_token_ids"] == [each["completion_token_ids"] for each in metrics]
    assert detail["prompt_token_ids"] == [each["prompt_token_ids"] for each in metrics]
    assert context.n_output_tokens == sum(len(segment.tokens) for segment in sampled)


async def test_what_the_model_does_wrong_is_its_observation(agent_class: Any, tmp_path: Path) -> None:
    turns = (call(None), call("x", "python"), call("sleep 30"), call("seq 1000"), call("true"), "Done.")
    async with serve(*turns) as live:
        _, document = await work(agent_class, live, tmp_path, command_seconds=1, max_output_characters=20)
    no_command, other_tool, slow, long, silent = observations(document)
    assert no_command == other_tool == 'Error: call the tool "bash" with a JSON object whose "command" is a string.'
    assert slow == "\n[ended with exit code 124; the limit is 1 s]"
    assert long == "1\n2\n3\n4\n5\n\n[3873 characters left out]\n\n999\n1000\n"
    assert silent == "[no output]"


async def test_a_limit_ends_the_conversation_and_not_the_trial(agent_class: Any, tmp_path: Path) -> None:
    async with serve(call("true")) as live:
        context, document = await work(agent_class, live, tmp_path, max_turns=2)
    assert (context.metadata["stop"], len(document["steps"])) == ("max_turns", 3)
    async with serve(call("seq 3000"), max_model_len=6000) as live:
        context, document = await work(agent_class, live, tmp_path, max_turns=5)
    assert (context.metadata["stop"], len(document["steps"])) == ("context_length", 2)


@pytest.mark.e2e
async def test_a_trial_that_harbor_ends_leaves_its_trajectory(agent_class: Any, tmp_path: Path) -> None:
    context = context_stand_in()
    async with serve(call("sleep 20")) as live:
        agent = agent_class(tmp_path, endpoint=live.url)
        await agent.setup(EnvironmentStandIn(tmp_path))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(agent.run("Sleep.", EnvironmentStandIn(tmp_path), context), 3)
        assert not live.engine.running
    document = json.loads((tmp_path / "trajectory.json").read_text())
    check_atif(document)
    assert (context.metadata["stop"], context.metadata["turns"]) == ("interrupted", 1)
    assert next(read_jsonl(tmp_path / "record.jsonl")).num_turns == 1


async def test_what_the_environment_does_wrong_is_not_an_observation(agent_class: Any, tmp_path: Path) -> None:
    class Broken(EnvironmentStandIn):
        async def exec(self, command: str, timeout_sec: int) -> Any:
            raise RuntimeError("the container is not there")

    async with serve(call("true")) as live:
        agent = agent_class(tmp_path, endpoint=live.url)
        with pytest.raises(RuntimeError, match="not there"):
            await agent.run("Do it.", Broken(tmp_path), context_stand_in())


async def test_an_endpoint_that_does_not_answer_is_named(
    agent_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_class(tmp_path, endpoint="http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"endpoint at http://127\.0\.0\.1:9 does not answer"):
        await agent.setup(EnvironmentStandIn(tmp_path))
    async with serve("Done.", api_key="boss") as live:
        with pytest.raises(RuntimeError, match="answered 401"):
            await work(agent_class, live, tmp_path)
        monkeypatch.setenv("VERL_TOOL_EVAL_API_KEY", "boss")
        await work(agent_class, live, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(HARBOR not in os.environ, reason=f"{HARBOR} names no interpreter that has harbor")
async def test_harbor_runs_the_agent(tmp_path: Path) -> None:
    script = ROOT / "tests/helpers/harbor_agent_run.py"
    environment = os.environ | {"PYTHONPATH": str(AGENT.parent)}
    async with serve(call("echo 21"), "It is 21.") as live:
        command = [os.environ[HARBOR], str(script), live.url, str(tmp_path)]
        ran = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, env=environment)
    found = json.loads(ran.stdout)
    assert found["errors"] == []
    assert (found["info"]["name"], found["info"]["model_info"]["name"]) == ("verl-tool", "toy")
    assert found["context"]["metadata"]["stop"] == "answered"
    assert len(found["context"]["rollout_details"][0]["completion_token_ids"]) == 2
    document = json.loads((tmp_path / "trajectory.json").read_text())
    check_atif(document)
    assert observations(document) == ["21\n"]
