"""What a tiny model learns from where the agent loop itself played the trajectories: prompts, calls and observations
token for token as in a training."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from from_scratch import END, IGNORED, Row
from transformers import PreTrainedTokenizerBase

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.content.parts import ImagePart
from verl_tool.protocol import ToolDescription

LINE = re.compile(r"^[^\n<][^\n]{5,}\n*", re.MULTILINE)
"""A line of what all prompts have in common is one token too: so small a model would learn nothing from its words."""


class ScriptedModel:
    """A generator of the loop whose turns are those of `write`, which gets the context and the trajectory's id."""

    def __init__(self, tokenizer: HFTokenizer, write: Callable[[str, str], str]) -> None:
        self._tokenizer, self._write = tokenizer, write

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, images: Sequence[ImagePart] = ()
    ) -> Generation:
        text = self._write(self._tokenizer.decode(prompt_ids), request_id)
        return Generation(self._tokenizer.encode(text + END), stop_reason="stop")


def to_lessons(trajectory: Trajectory) -> list[Row]:
    """The tokens of each of its training rows, those that the model wrote with a label."""
    return [
        {
            "input_ids": row.prompt_ids + row.response_ids,
            "labels": [IGNORED] * len(row.prompt_ids)
            + [token if mask else IGNORED for token, mask in zip(row.response_ids, row.response_mask, strict=True)],
        }
        for row in trajectory.rows
    ]


def common_lines(
    tokenizer: PreTrainedTokenizerBase,
    options: EpisodeOptions,
    tools: Sequence[ToolDescription],
    row: Mapping[str, Any],
) -> list[str]:
    """The lines that the prompts have in common: how to answer, how to call, and the schemas of the tools."""
    first = dict(row["prompt"][0])
    text = PromptRenderer(HFTokenizer(tokenizer), options, tools).text([first])
    return LINE.findall(text.partition("system\n")[2].partition(END)[0])
