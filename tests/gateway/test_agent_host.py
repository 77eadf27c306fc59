"""A program that judges its own run writes the verdict where nothing that it starts can write."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agent_sessions import WritingGenerator
from containers import stand_in
from real_templates import TemplateTokenizer
from template_families import QWEN

from verl_tool.agent_loop.trajectory import Excluded, Trajectory
from verl_tool.errors import ConfigError, SandboxError
from verl_tool.formats import format_by_name
from verl_tool.gateway.agent_host import AgentHost, AgentTask, finish_session
from verl_tool.gateway.agent_program import AgentProgram
from verl_tool.gateway.gateway_app import Gateway
from verl_tool.gateway.inside import environment_program
from verl_tool.gateway.program.container_program import ContainerService
from verl_tool.gateway.session import SessionModel
from verl_tool.protocol import FaultKind
from verl_tool.sandbox.isolation.levels import Level, strongest
from verl_tool.verification import EnvironmentVerification, Verdict

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or strongest().level is not Level.full, reason="no sandbox on this machine"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(120),
]

TOKENIZER = TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN)
RUNNER = Path(environment_program.__file__)
BEGINS = f"""
import json, os, subprocess, sys, time, urllib.request
sys.path.insert(0, {str(RUNNER.parent)!r})
from environment_program import take_channel, write_verdict
number = os.environ["VERL_TOOL_VERDICT_FD"]
channel = take_channel()
example = json.loads(os.environ["ENVIRONMENT"])
body = json.dumps({{"messages": [{{"role": "user", "content": "go"}}]}}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
try:
    urllib.request.urlopen(urllib.request.Request(url, body, {{"content-type": "application/json"}}), timeout=20).read()
except OSError:
    pass
"""
JUDGES = 'write_verdict(channel, example["reward"], {"moves": 3, "ratio": float("nan")})\n'
FORGES = """
import ctypes, os, sys
forged = b'{"reward": 1.0}'
for name in os.listdir("/proc"):
    if not name.isdigit() or int(name) == os.getpid():
        continue
    try:
        for fd in os.listdir(f"/proc/{name}/fd"):
            with open(f"/proc/{name}/fd/{fd}", "wb", 0) as file:
                file.write(forged)
    except OSError:
        pass
    try:
        open(f"/proc/{name}/mem", "r+b")
        print("opened the memory of", name)
    except OSError:
        pass
    if ctypes.CDLL(None).ptrace(16, int(name), 0, 0) == 0:
        print("traces", name)
try:
    os.write(int(sys.argv[1]), forged)
    print("wrote")
except OSError:
    pass
print("VERL_TOOL_VERDICT_FD" in os.environ)
"""
ATTACKS = {
    "a child": f"print(subprocess.run([sys.executable, '-c', {FORGES!r}, number], close_fds=False, text=True, "
    "stdout=subprocess.PIPE).stdout)\n",
    "a fork": """
child = os.fork()
if not child:
    os.write(2, b"forked ")
    try:
        os.write(channel, b'{"reward": 1.0}')
    finally:
        os._exit(0)
os.waitpid(child, 0)
""",
}


async def run(
    code: str,
    environment: Mapping[str, Any] | None = None,
    turns: tuple[str, ...] = ("Hello.<|im_end|>",),
    **options: Any,
) -> Trajectory:
    """The rollout of a program that judges, of one request and `code`."""
    model = SessionModel.create(WritingGenerator(TOKENIZER, turns), TOKENIZER, [format_by_name("hermes")], 1 << 20)
    gateway = Gateway(model)
    session = gateway.open_session()
    fields = {
        "command": ("python3", "-c", BEGINS + code),
        "readable": (str(RUNNER),),
        "env": {"ENVIRONMENT": "{environment}"},
    }
    program = AgentProgram.model_validate({"judges": True, "seconds": 30, **fields, **options})
    host = AgentHost(gateway.app(for_agents=True), program)
    environment = {"reward": 2.5} if environment is None else environment
    task = AgentTask.of_row(
        *([{"role": "user", "content": "go"}], {"environment": environment}, EnvironmentVerification(), "row 7"),
        judges=True,
    )
    try:
        await host.start()
        return await host.run(session, task, partial(finish_session, session))
    finally:
        await host.close()


def verdict_of(rollout: Trajectory) -> Verdict:
    assert rollout.fault is None, rollout.fault
    assert rollout.verdict is not None
    assert rollout.verdict.by_environment
    return rollout.verdict


@pytest.mark.parametrize("reward", [2.5, -1, 0])
async def test_the_programs_verdict_is_that_of_the_rollout(reward: float) -> None:
    verdict = verdict_of(await run(JUDGES, {"reward": reward}))
    assert (verdict.score, verdict.numbers, verdict.counts) == (reward, {"moves": 3.0}, True)


async def test_a_program_in_a_container_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = await run(JUDGES, image="any", container={"engine": stand_in(tmp_path, monkeypatch)})
    assert verdict_of(rollout).reward == 2.5


async def test_an_engine_that_fails_after_a_request_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = ContainerService.end

    async def fail(service: ContainerService) -> None:
        await stop(service)
        raise SandboxError("the engine does not answer")

    monkeypatch.setattr(ContainerService, "end", fail)
    rollout = await run(JUDGES, image="any", container={"engine": stand_in(tmp_path, monkeypatch)})
    verdict = verdict_of(rollout)
    assert verdict.fault is not None
    assert (verdict.fault.kind, verdict.score) == (FaultKind.SANDBOX, None)
    assert "does not answer" in verdict.fault.message


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_what_the_program_starts_cannot_write_the_verdict(attack: str) -> None:
    rollout = await run(attack + JUDGES, {"reward": 0.25})
    output = rollout.extra["agent_program"]["output"]
    assert "False" in output or "forked" in output, "it ran"
    assert not any(word in output for word in ("opened", "traces", "wrote")), output
    assert verdict_of(rollout).reward == 0.25, output


CASES = {
    "it fails": ("sys.exit('no score')", "exited with 1 without a verdict; it printed: no score"),
    "it is killed": ("subprocess.run(['sh', '-c', f'kill -9 {os.getpid()}'])", "exited with -9 without"),
    "it is killed with its parent": ("os.kill(os.getppid(), 9)", "exited with -9 without"),
    "nonsense": ("os.write(channel, b'[1')", "is no JSON"),
    "no number": ('os.write(channel, b\'{"reward": "x"}\')', "is no finite number"),
    "too long": ("os.write(channel, b'x' * (1 << 16))", "is no JSON"),
}


@pytest.mark.parametrize(("code", "words"), CASES.values(), ids=CASES)
async def test_a_program_without_a_verdict_gets_nothing(code: str, words: str) -> None:
    verdict = verdict_of(await run(code))
    assert (verdict.reward, verdict.score) == (None, 0.0)
    assert words in verdict.told


async def test_a_program_that_names_a_misconfiguration_gets_a_fault() -> None:
    verdict = verdict_of(await run('os.write(channel, b\'{"misconfigured": "no grader"}\')'))
    assert verdict.fault is not None
    assert (verdict.fault.kind, verdict.fault.message) == (FaultKind.MISCONFIGURED, "no grader")
    assert verdict.score is None


async def test_a_program_at_its_time_limit_gets_nothing() -> None:
    verdict = verdict_of(await run("time.sleep(60)", seconds=4))
    assert (verdict.score, "was killed at its time limit" in verdict.told) == (0.0, True)


async def test_an_engine_that_fails_is_a_fault_whatever_the_program_says() -> None:
    rollout = await run(JUDGES, turns=())
    assert (rollout.excluded, rollout.verdict) == (Excluded.FAULT, None)


def test_a_row_and_a_program_agree_about_an_environment() -> None:
    messages = [{"role": "user", "content": "go"}]
    with pytest.raises(
        ConfigError, match=r"row 3 has tools_kwargs.environment, which gateway.program does not play in"
    ):
        AgentTask.of_row(messages, {"environment": {}}, None, "row 3")
    with pytest.raises(ConfigError, match=r"row 3 has no tools_kwargs.environment"):
        AgentTask.of_row(messages, {}, None, "row 3", judges=True)
    with pytest.raises(ConfigError, match=r"leave reward_model.ground_truth empty"):
        AgentTask.of_row(
            messages, {"environment": {}}, EnvironmentVerification(data={"answer": 1}), "row 3", judges=True
        )
