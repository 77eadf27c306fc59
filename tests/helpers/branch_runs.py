"""Runs with trajectories of the real loop on a real tool server, and scripted models."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from from_scratch import make_model
from omegaconf import OmegaConf
from run_folders import MODEL
from stored_runs import TOKENIZER, stored_run, trajectory

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.trajectory import Author, Trajectory, write_jsonl
from verl_tool.client import ToolClient

QUESTION, ANSWER = "How many are left?", "4"
OPTIONS = {"action_stop_tokens": ["</shop>", "</python>"], "max_turns": 4, "max_response_length": 900}
OVERRIDES = (
    "data.max_response_length=900",
    "actor_rollout_ref.agent.action_stop_tokens=['</shop>','</python>']",
    "actor_rollout_ref.agent.max_turns=4",
    "tool_server.start=null",
)
SHOP = """
from verl_tool.servers.tools.base import Tool, ToolResult

class Shop(Tool):
    name = "shop"
    description = "Sells."
    stateful = True
    price = "PRICE"
    forks = 0

    async def create_state(self, trajectory_id, extra):
        return {"sold": []}

    async def run(self, call, context):
        context.state["sold"].append(call.input.strip())
        return ToolResult(f"[{' '.join(context.state['sold'])} at PRICE]")
"""
"""A tool whose state cannot be forked."""
FORKS = """
    async def fork_state(self, state):
        type(self).forks += 1
        return {"sold": list(state["sold"])}
"""


def answer(text: str) -> str:
    """Make an observation as the server does."""
    return f"\n<result>\n{text}\n</result>\n"


class Told:
    """Writes the same turns in each trajectory, and then ends. `fed` has its inputs by trajectory."""

    def __init__(self, *turns: str) -> None:
        self.turns = turns
        self.fed: dict[str, list[list[int]]] = {}

    async def generate(self, prompt_ids: list[int], sampling_params: Mapping[str, Any], request_id: str) -> Generation:
        fed = self.fed.setdefault(request_id, [])
        fed.append(list(prompt_ids))
        ids = TOKENIZER.encode(self.turns[len(fed) - 1], add_special_tokens=False)
        return Generation(ids, [-0.25] * len(ids), "stop")


def shop_tool(folder: Path, price: str = "3", *, forks: bool = False) -> Path:
    """Return the file of the tool."""
    path = folder / f"shop_{price}_{forks}.py"
    path.write_text(SHOP.replace("PRICE", price) + (FORKS if forks else ""))
    return path


async def recorded(url: str, turns: Sequence[str], options: Mapping[str, Any] = OPTIONS) -> Trajectory:
    """Return the records of the loop for a model that writes `turns`, with the tools at `url`."""
    prompt = trajectory(0, QUESTION, [], None).prompt_ids
    async with ToolClient(url) as client:
        episode = Episode(Told(*turns), client, HFTokenizer(TOKENIZER), EpisodeOptions.load(options))
        made = await episode.run(prompt)
    return replace(made, reward=0.0, extra={"index": 0, "reward_extra_info": {"acc": 0.0}})


def branch_run(folder: Path, lines: Sequence[Trajectory], *overrides: str, name: str = "step_1") -> Path:
    """Write a run with these records and a tiny random model."""
    run = stored_run(folder, [(QUESTION, ANSWER)], [], *OVERRIDES, *overrides)
    write_jsonl(run / "trajectories" / f"{name}.jsonl", lines)
    path = run / "config/config.yaml"  # with all values, as a training leaves it: other processes lack its resolvers
    OmegaConf.save(OmegaConf.create(OmegaConf.to_container(OmegaConf.load(path), resolve=True)), path)
    make_model(TOKENIZER, hidden=32, layers=1, seed=0).save_pretrained(run / MODEL)
    TOKENIZER.save_pretrained(run / MODEL)
    return run


def authors(made: Trajectory) -> str:
    """Return one letter per segment after the prompt: m(odel), t(ool), in upper case if it is edited."""
    letters = {Author.MODEL: "m", Author.TOOL: "t", Author.TEMPLATE: "c", Author.PROMPT: "p"}
    return "".join(letters[s.author].upper() if s.edited else letters[s.author] for s in made.response)


def runs_of(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return a mask as pairs of value and length."""
    return [(value, len(list(group))) for value, group in itertools.groupby(mask)]
