"""A tiny vision model that can zoom in and read a digit, and mostly looks in the wrong place or not at all.

    python examples/train/pixel_reasoner/warmup.py --data data --output outputs/pixel_reasoner/model

It learns from trajectories that the agent loop itself made, with the real tool, so that prompts, calls and images stand
there token for token as in a training. Most of them answer without a look, and the others zoom in on any quarter
(`HABITS`). As many again teach where the right quarter is, and to read what it shows. Learning stops as soon as a look
that was begun succeeds with the wanted probability. That a look pays, and to look in no other place, is left to
reinforcement learning.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from make_pictures import SEEN, box_of
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).resolve().parents[1]))
from from_scratch import IGNORED, Row, WarmUp, make_tokenizer, warm_up
from from_scratch_vision import CHAT_TEMPLATE, VISION, make_processor, make_vision_model, with_images
from trajectory_lessons import ScriptedModel

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.qwen_images import QwenImages
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.conversation import Conversation, read_conversation
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.formats import HERMES
from verl_tool.protocol import IMAGES_FIELD
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tools import load_tools

TOOLS = "pixel_reasoner"
OPTIONS = EpisodeOptions(enable_mtrl=True, tool_schemas="none", formats=("hermes",), max_turns=1, max_obs_length=32)
"""The loop's in `cpu.yaml`, as far as it matters here."""
_CALL = HERMES.write_call("crop_image", {"bbox_2d": [0, 0, 0, 0], "target_image": 1})
BEGINNING = _CALL.partition("0, 0, 0, 0")[0]
"""Of every call, before it says where."""
PIECES = (*_CALL.split("0, 0, 0, 0"), "64", "128", "\\boxed{")
"""One token each, as is the text of an observation: what calls and answers have in common, and the quarters' edges."""
HABITS = {"answer": 14, "any quarter": 6}
"""Of twenty trajectories, how many answer at once, and how many look somewhere."""
VOCABULARY = 320
"""Most tokens, but for pieces."""
MEASURED_ROWS = 128


def call_of(quarter: int) -> str:
    """The call that shows a quarter."""
    return HERMES.write_call("crop_image", {"bbox_2d": list(box_of(quarter)), "target_image": 1})


def answer_of(row: Mapping[str, Any]) -> str:
    """The turn that answers."""
    return f"\\boxed{{{row['reward_model']['ground_truth']}}}"


def guess(rng: random.Random) -> str:
    """The turn that answers any digit."""
    return f"\\boxed{{{rng.randrange(10)}}}"


def quarter_of(row: Mapping[str, Any]) -> int:
    """Where the card is."""
    return int(row["extra_info"]["qid"].rpartition("_")[2])


class Player:
    """Makes trajectories with the loop of the training."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, images: QwenImages, tools: InProcessTools) -> None:
        self.tokenizer = HFTokenizer(tokenizer)
        self.beginning = len(self.tokenizer.encode(BEGINNING))
        """Tokens of a call before it says where."""
        self.before_end = len(self.tokenizer.encode(guess(random.Random(0)))) - 1
        """Tokens of an answer up to its digit."""
        self._prompts = PromptRenderer(self.tokenizer, OPTIONS)
        self._turns: dict[str, list[str]] = {}
        """Turns that are not written yet, by the trajectory's id."""
        model = ScriptedModel(self.tokenizer, lambda _, trajectory_id: self._turns[trajectory_id].pop(0))
        self._episode = Episode(model, tools, self.tokenizer, OPTIONS, image_tokens=images)

    async def play(self, row: Mapping[str, Any], turns: Sequence[str], trajectory_id: str) -> Trajectory:
        """The trajectory in which the model writes these turns."""
        self._turns[trajectory_id] = list(turns)
        asked = conversation_of(row)
        prompt = self._prompts.ids(asked.messages, None, trajectory_id)
        return await self._episode.run(
            prompt, images=asked.images, trajectory_id=trajectory_id, use_tool=bool(row["use_tool"])
        )


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """What the model is asked."""
    return read_conversation([dict(message) for message in row["prompt"]], row["images"], row["extra_info"]["qid"])


def as_lesson(trajectory: Trajectory, blind: bool) -> Row:
    """Its tokens, those that the model wrote with a label. `blind`: it looked at a quarter where there is no card; what
    it answers then is nothing to learn."""
    prompt, response = trajectory.prompt_ids, trajectory.response_ids
    labels = [token if mask else IGNORED for token, mask in zip(response, trajectory.response_mask, strict=True)]
    if blind:
        last = len(trajectory.response[-1].tokens)
        labels[-last:] = [IGNORED] * last
    return {
        "input_ids": prompt + response,
        "labels": [IGNORED] * len(prompt) + labels,
        "images": trajectory.visible_images,
    }


def once_begun(trajectory: Trajectory, behind: int) -> Row:
    """The lesson without labels on the first `behind` tokens that the model wrote."""
    lesson = as_lesson(trajectory, blind=False)
    labels = list(lesson["labels"])
    for place in [n for n, label in enumerate(labels) if label != IGNORED][:behind]:
        labels[place] = IGNORED
    return {**lesson, "labels": labels}


async def lessons(rows: Sequence[Mapping[str, Any]], player: Player, rng: random.Random) -> tuple[list[Row], list[Row]]:
    """What to learn from, and by what success is measured, of different rows: looks in the right place; without the
    tool, guesses."""
    learned, measured = [], []
    for number, row in enumerate(rows):
        right, answer, name = quarter_of(row), answer_of(row), f"row-{number}"
        kept = measured if number < MEASURED_ROWS else learned
        if row["use_tool"]:
            kept.append(once_begun(await player.play(row, [call_of(right), answer], f"{name}-begun"), player.beginning))
            if kept is measured:
                continue
        [habit] = rng.choices([*HABITS], [*HABITS.values()]) if row["use_tool"] else ["answer"]
        if habit == "answer":
            guessed = await player.play(row, [guess(rng)], name)
            kept.append(once_begun(guessed, 0 if kept is learned else player.before_end))
        else:
            quarter = rng.randrange(4)
            trajectory = await player.play(row, [call_of(quarter), answer], name)
            kept.append(as_lesson(trajectory, blind=quarter != right))
    return learned, measured


async def made(
    rows: Sequence[Mapping[str, Any]], seed: int
) -> tuple[PreTrainedTokenizerBase, QwenImages, list[Row], list[Row]]:
    """The tokenizer, how the model reads images, what to learn from, and what success is measured by."""
    async with InProcessTools(load_tools(TOOLS)) as tools:
        shown = {IMAGES_FIELD: conversation_of(rows[0]).images}
        observation = (await tools.call("first", call_of(0), step=0, extra=shown)).observation
        texts = ["user\nassistant\n", rows[0]["prompt"][-1]["content"], observation]
        tokenizer = make_tokenizer(texts * 100, VOCABULARY, CHAT_TEMPLATE, VISION)
        tokenizer.add_tokens([*PIECES, *observation.strip().split("<image>")])
        images = QwenImages(make_processor(tokenizer, SEEN).image_processor, HFTokenizer(tokenizer))
        player = Player(tokenizer, images, tools)
        return tokenizer, images, *await lessons(rows, player, random.Random(seed))


def main(
    data: Annotated[Path, typer.Option("--data", help="Folder with train.parquet.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make and warm up the model. Exits with 1 if looks that are begun do not succeed often enough."""
    rows = pd.read_parquet(data / "train.parquet").to_dict("records")
    tokenizer, images, learned, measured = asyncio.run(made(rows, seed))
    how = WarmUp(target=0.7, max_steps=600, learning_rate=1e-3, seed=seed)
    model = make_vision_model(tokenizer, hidden=128, layers=3, vision=96, depth=2, seed=seed)
    warm_up(model, tokenizer, learned, measured, how, output, with_images(images))
    make_processor(tokenizer, SEEN).save_pretrained(output)


if __name__ == "__main__":
    typer.run(main)
