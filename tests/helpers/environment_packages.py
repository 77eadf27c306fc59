"""Toy environments of packages with loops of their own, and rollouts in them through the gateway."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agent_sessions import WritingGenerator
from real_templates import TemplateTokenizer
from template_families import QWEN

from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.formats import format_by_name
from verl_tool.gateway.agent_host import AgentHost, AgentTask, finish_session
from verl_tool.gateway.agent_program import AgentProgram
from verl_tool.gateway.gateway_app import Gateway
from verl_tool.gateway.session import SessionModel
from verl_tool.protocol import ENVIRONMENT_FIELD

TOKENIZER = TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN)
_SECONDS = 240.0
INSPECT = """
    from inspect_ai import Task, task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.scorer import includes, model_graded_qa
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def add():
        async def execute(x: int, y: int):
            '''Add two numbers.

            Args:
                x: One number.
                y: The other.
            '''
            return x + y
        return execute

    @task
    def sums(largest: int = 9):
        samples = [Sample(input=f"What is {a}+{a}?", target=str(2 * a)) for a in range(largest)]
        return Task(dataset=MemoryDataset(samples), solver=[use_tools(add()), generate()], scorer=includes())

    @task
    def graded():
        return Task(dataset=[Sample("Say yes.", id="g")], solver=generate(), scorer=model_graded_qa())
"""
VERIFIERS = """
    import verifiers.v1 as vf

    class Tools(vf.Toolset[vf.ToolsetConfig]):
        TOOL_PREFIX = None

        @vf.tool
        def add(self, x: int, y: int) -> str:
            '''Add two numbers.'''
            return str(x + y)

    class SumData(vf.TaskData):
        answer: str

    class SumTaskConfig(vf.TaskConfig):
        tools: bool = False

    class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
        @classmethod
        def toolsets(cls, config):
            return [Tools(vf.ToolsetConfig())] if config.tools else []

        @vf.reward(weight=2.0)
        async def right(self, task: SumData, trace: vf.Trace) -> float:
            return float(task.answer in (trace.last_reply or ""))

        @vf.metric
        async def turns(self, trace: vf.Trace) -> float:
            return float(trace.num_turns)

    class SumConfig(vf.TasksetConfig):
        task: SumTaskConfig = SumTaskConfig()

    class SumTaskset(vf.Taskset[SumTask, SumConfig]):
        def load(self):
            for a in range(5):
                yield SumTask(SumData(prompt=f"What is {a}+{a}?", answer=str(2 * a)), self.config.task)

    __all__ = ["SumTaskset"]

    if __name__ == "__main__":
        Tools.run()
"""
LENGTHS = {
    "inspect": """
    from inspect_ai import Task, task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import Score, mean, scorer
    from inspect_ai.solver import generate

    @scorer(metrics=[mean()])
    def length():
        async def score(state, target):
            return Score(value=len(state.output.completion) % 3 / 2)
        return score

    @task
    def lengths():
        return Task(dataset=[Sample(f"{a}*{a}=", id=str(a)) for a in range(6)], solver=generate(), scorer=length())
""",
    "verifiers": """
    import verifiers.v1 as vf

    class LengthTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
        @vf.reward(weight=1.0)
        async def length(self, task: vf.TaskData, trace: vf.Trace) -> float:
            return len(trace.last_reply or "") % 3 / 2

    class LengthTaskset(vf.Taskset[LengthTask, vf.TasksetConfig]):
        def load(self):
            for a in range(6):
                yield LengthTask(vf.TaskData(prompt=f"{a}*{a}="), self.config.task)

    __all__ = ["LengthTaskset"]
""",
}
"""Modules whose reward is in the length of the model's text, so that a tiny model gets various ones."""


def peer(name: str) -> Path:
    """The folder in which ``FOLDER/NAME/bin/python`` is the package's; skips without it."""
    folder = os.environ.get("VERL_TOOL_PEERS")
    if folder is None:
        pytest.skip("VERL_TOOL_PEERS is not set: bash scripts/install_peers.sh FOLDER installs what it names")
    if not (Path(folder) / name / "bin" / "python").exists():
        pytest.skip(f"{folder}/{name} is not there: bash scripts/install_peers.sh {folder} {name}")
    return Path(folder)


def write_module(folder: Path, name: str, text: str) -> Path:
    """Write a module that other users may read, and return its path."""
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    path.chmod(0o644)
    return path


async def play(
    preset: str, install: Path, environment: Mapping[str, Any], turns: Sequence[str], module: Path
) -> tuple[Trajectory, WritingGenerator]:
    """The rollout of one example, in which the model writes `turns`."""
    generator = WritingGenerator(TOKENIZER, turns)
    gateway = Gateway(SessionModel.create(generator, TOKENIZER, [format_by_name("hermes")], 1 << 20))
    session = gateway.open_session()
    fields = {"readable": (str(module),), "env": {"PYTHONPATH": str(module.parent)}, "seconds": _SECONDS}
    program = AgentProgram.model_validate({"preset": preset, "install": str(install), **fields}).resolve()
    host = AgentHost(gateway.app(for_agents=True), program)
    task = AgentTask.of_row(
        [{"role": "user", "content": "go"}], {ENVIRONMENT_FIELD: environment}, None, "row 0", judges=program.judges
    )
    try:
        await host.start()
        return await host.run(session, task, partial(finish_session, session)), generator
    finally:
        await host.close()
