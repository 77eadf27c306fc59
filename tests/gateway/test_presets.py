"""The real agents, in the sandbox, against a scripted model. `bash scripts/install_agents.sh` installs them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from agent_sessions import WritingGenerator
from real_templates import TemplateTokenizer
from template_families import QWEN

from verl_tool.errors import ConfigError
from verl_tool.formats import format_by_name
from verl_tool.gateway.agent_program import AgentProgram, run_program
from verl_tool.gateway.gateway_app import Gateway
from verl_tool.gateway.presets import PRESETS, Preset
from verl_tool.gateway.program.session_socket import listen_for
from verl_tool.gateway.session import SessionModel
from verl_tool.sandbox.isolation.levels import Level, strongest
from verl_tool.sandbox.sandboxed_service import ServiceSandbox

INSTALL = Path(os.environ.get("VERL_TOOL_AGENTS", Path(__file__).parents[2] / ".agents"))
STARTED = {
    "claude_code": "node_modules/.bin/claude",
    "codex": "node_modules/.bin/codex",
    "mini_swe_agent": "mini/bin/mini",
    "openai_agents": "openai_agents/bin/python",
    "opencode": "node_modules/.bin/opencode",
    "pi": "node_modules/.bin/pi",
    "qwen_code": "node_modules/.bin/qwen",
    "smolagents": "smolagents/bin/smolagent",
}
TOKENIZER = TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN)


def call(name: str, **arguments: object) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call><|im_end|>"


def shell(preset: str, command: str) -> str:
    """A call of the agent's own tool that runs commands."""
    if preset == "codex":
        return call("exec_command", cmd=command)
    if preset == "claude_code":
        return call("Bash", command=command, description="d")
    if preset == "qwen_code":
        return call("run_shell_command", command=command, is_background=False)
    described = {"description": "d"} if preset == "opencode" else {}
    return call("bash", command=command, **described)


class Scripted(WritingGenerator):
    """Lists the folder, writes the answer, and ends; a request for a title is answered with one."""

    def __init__(self, preset: str) -> None:
        ends = {
            "mini_swe_agent": call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
            "smolagents": call("final_answer", answer="42"),
        }
        steps = [shell(preset, "ls; cat note.txt"), shell(preset, "echo 42 > answer.txt")]
        super().__init__(TOKENIZER, [*steps, ends.get(preset, "Done: 42.<|im_end|>")])

    async def generate(self, prompt_ids, sampling_params, request_id):
        if "<tools>" not in self.tokenizer.decode(prompt_ids):
            self.turns.insert(0, "A title<|im_end|>")
        return await super().generate(prompt_ids, sampling_params, request_id)


@pytest.mark.skipif(sys.platform != "linux" or strongest().level is not Level.full, reason="no sandbox here")
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("preset", STARTED)
async def test_a_real_agent_is_one_row(preset: str, tmp_path: Path) -> None:
    if not (INSTALL / STARTED[preset]).exists():
        pytest.skip(f"{preset} is not installed in {INSTALL}; run bash scripts/install_agents.sh")
    generator = Scripted(preset)
    model = SessionModel.create(generator, TOKENIZER, [format_by_name("hermes")], 1 << 20)
    for each in (tmp_path, *tmp_path.parents[:2]):
        each.chmod(0o755)
    program = AgentProgram(preset=preset, install=str(INSTALL), seconds=120, keep_files=("answer.txt",)).resolve()
    gateway, sandbox = Gateway(model), ServiceSandbox(program.limits)
    session = gateway.open_session()
    task = "Read note.txt and write the number into answer.txt."
    async with listen_for(session.id, gateway.app(for_agents=True), tmp_path) as socket:
        result = await run_program(sandbox, program, session, socket, task, {"note.txt": b"The number is 42.\n"})
    rollout = await session.finish(1.0)
    await sandbox.close()
    assert result.files == {"answer.txt": "42\n"}, result.output
    assert generator.turns == [], result.output
    assert (len(rollout.rows), rollout.num_turns, generator.turns) == (1, 3, [])


def test_each_preset_is_run_by_a_test() -> None:
    assert {*STARTED, "inspect", "verifiers"} == set(PRESETS), "the two are in inside/test_environment_program.py"


def test_what_is_not_installed_or_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="install_agents"):
        AgentProgram(preset="pi", install=str(tmp_path / "none")).resolve()
    with pytest.raises(ConfigError, match="known: claude_code"):
        AgentProgram(preset="nobody").resolve()
    with pytest.raises(ConfigError, match="none of command, python and preset; set one"):
        AgentProgram().resolve()
    with pytest.raises(ConfigError, match="has command and python; set one"):
        AgentProgram(command=("true",), python="a:b").resolve()


def test_a_python_that_would_hide_that_of_an_image_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"mini_swe_agent": lambda install: Preset(("mini",), {}, (str(install), "/usr"))}
    monkeypatch.setattr("verl_tool.gateway.agent_program.PRESETS", shared)
    with pytest.raises(ConfigError, match="/usr, which would hide"):
        AgentProgram(preset="mini_swe_agent", install=str(tmp_path), image="task:1").resolve()
    assert AgentProgram(preset="mini_swe_agent", install=str(tmp_path)).resolve().command == ("mini",)
