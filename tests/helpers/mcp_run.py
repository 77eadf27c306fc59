"""Inputs of the trainings in assets/docs/mcp.md: its MCP server, questions that its tool answers, and a tiny model that
calls it."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from calculator_run import AGENT, Calculator
from script_module import load_script

from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.mcp.catalog import find_offers
from verl_tool.servers.mcp.config import McpConfig
from verl_tool.servers.mcp.tool import mcp_tools
from verl_tool.servers.tools import Tool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "assets" / "docs" / "mcp.md"
RECIPE = ROOT / "examples" / "train" / "function_calling"
_BLOCK = re.compile(r"```(?P<kind>python|json|bash)\n(?P<text>.*?)```", re.DOTALL)
_SECTION = PAGE.read_text(encoding="utf-8").partition("## Train with MCP tools\n")[2].partition("\n## ")[0]
_ON_PAGE = [(found["kind"], found["text"]) for found in _BLOCK.finditer(_SECTION)]
SERVER = next(text for kind, text in _ON_PAGE if kind == "python")
SERVERS_JSON = next(text for kind, text in _ON_PAGE if kind == "json")
COMMAND = next(line for _, text in _ON_PAGE for line in text.replace("\\\n", "").splitlines() if "main_ppo" in line)
OVERRIDES = (
    *shlex.split(COMMAND)[3:],
    *("reward.reward_manager.name=gsm8k", f"{AGENT}.max_obs_length=16", "algorithm.adv_estimator=grpo"),
    *("data.max_prompt_length=72", "data.max_response_length=72", "actor_rollout_ref.rollout.max_model_len=144"),
)
"""The settings of the page, and those for the tiny model."""


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Calculator:
    """Make server, data and model in `folder`, which becomes the working folder."""
    (folder / "double.py").write_text(SERVER)
    (folder / "servers.json").write_text(SERVERS_JSON)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    rows = [_row(number, i) for i, number in enumerate(range(10, 100))]
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(rows[16:80]).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:16]).to_parquet(folder / "test.parquet")
    config = McpConfig.from_file(Path("servers.json"))
    _make_model(rows, mcp_tools(config, find_offers(config)), folder / "model")
    return Calculator(folder, folder / "model")


def _row(number: int, index: int) -> dict[str, Any]:
    return {
        "data_source": "numbers",
        "prompt": [{"role": "user", "content": f"What is twice {number}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"split": "any", "index": index, "arguments": json.dumps({"number": number})},
        "agent_name": "verltool_agent",
        "use_tool": True,
    }


def _make_model(rows: Sequence[dict[str, Any]], tools: Sequence[Tool], folder: Path) -> None:
    """Train the model on trajectories of the loop with the real tools, so that it is right half of the time."""
    sys.path.append(str(RECIPE.parent))
    warmup = load_script("function_calling_warmup", RECIPE / "warmup.py")

    async def lessons() -> tuple[Any, list[Any]]:
        async with InProcessTools(tools) as running:
            [tool] = running.describe()
            tokenizer = warmup.make_tokenizer(warmup.texts_of(rows, [tool]), 400, warmup.CHAT_TEMPLATE)
            common = warmup.common_lines(tokenizer, warmup.OPTIONS, [tool], rows[0])
            tokenizer.add_tokens([*warmup.TAGS, *warmup.PIECES, *common])
            player = warmup.Player(tokenizer, running)
            played = [await player.play(row, tool, f"row-{i}") for i, row in enumerate(rows)]
            return tokenizer, [lesson for each in played for lesson in warmup.to_lessons(each)]

    tokenizer, learned = asyncio.run(lessons())
    model = warmup.make_model(tokenizer, hidden=64, layers=2, seed=0)
    how = warmup.WarmUp(target=0.4, max_steps=600, learning_rate=3e-3, seed=0, batch_size=16)
    warmup.warm_up(model, tokenizer, learned, learned, how, folder)
