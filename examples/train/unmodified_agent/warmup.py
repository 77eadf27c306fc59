"""A tiny model that can use the agent pi, and mostly guesses instead; made from scratch.

    python examples/train/unmodified_agent/warmup.py --data data --install .agents --output outputs/model

It learns from sessions that the real agent had with a scripted model behind the gateway. In a session the script
guesses at once, looks into the folder and reads the file of another box, or reads the right one. Each way begins with
a token of its own; which of them is right is left to reinforcement learning. As a word of a task is one token, a
session stands for all that differ from it by an exchange of words.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from make_boxes import BOXES, NUMBERS, WORDS, name_file
from rich.progress import track
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).resolve().parents[1]))
from from_scratch import (
    END,
    Row,
    WarmUp,
    console,
    encode,
    make_model,
    make_tokenizer,
    once_begun,
    warm_up,
    without_token,
)
from trajectory_lessons import ScriptedModel, to_lessons

from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.formats import HERMES
from verl_tool.gateway.agent_host import PROGRAM, AgentHost, AgentTask, finish_session
from verl_tool.gateway.agent_program import AgentProgram
from verl_tool.gateway.gateway_app import Gateway
from verl_tool.gateway.session import SessionModel

CHAT_TEMPLATE = (Path(__file__).parents[1] / "function_calling" / "chat_template.jinja").read_text(encoding="utf-8")
THERE, ELSEWHERE = "That box.", "Any box."
"""Each begins the second turn and is one token: what the model decides for, whatever comes after it."""
ANSWER, ANSWER_END = "<answer>", "</answer>"
LOOK = HERMES.write_call("bash", {"command": "ls"})
GUESS = "guess"
HABITS = {GUESS: 9, ELSEWHERE: 8, THERE: 3}
"""Of twenty sessions, how many go which way."""
SESSIONS = {GUESS: 8, ELSEWHERE: 18, THERE: 36}
"""Of the real agent, of each way; half as many again of the right one measure the success."""
LESSONS, MEASURED = 6000, 64
COPYING = 1.0
"""Lessons in copying for each other one."""
VOCABULARY = 320
"""Most tokens, but for words and the agent's own text."""
DEVIATION = 0.05
"""Of the weights at the start: with the usual 0.02 so small a model takes several times as long until it copies."""
ATTEMPTS, SEEDS = 3, 1000
"""Initialisations that are tried, and how far apart their seeds are."""
AT_ONCE = 4
"""Programs at a time."""
MAX_TOKENS = 1 << 16
ASKED = re.compile(r"Which (\w+) is in the (\w+) box\?")


def write_turn(context: str, way: str, rng: random.Random) -> str:
    """What the scripted model writes behind `context`."""
    asked, *results = context[context.rindex("<|im_start|>user\nWhich ") :].split("<tool_response>")
    [(kind, box)] = ASKED.findall(asked)
    if not results:
        return f"{ANSWER}{rng.choice(WORDS[kind])}{ANSWER_END}" if way == GUESS else LOOK
    if len(results) > 1:
        [word] = re.findall(rf"^{kind}: (\w+)$", results[-1], re.MULTILINE)
        return f"{ANSWER}{word}{ANSWER_END}"
    file_of = {name.partition("-")[0]: name for name in re.findall(r"^\w+-\d+\.txt$", results[0], re.MULTILINE)}
    read = box if way == THERE else rng.choice([each for each in file_of if each != box])
    return f"{way}\n{HERMES.write_call('read', {'path': file_of[read]})}"


def build_tokenizer(agent_blocks: Sequence[str]) -> PreTrainedTokenizerBase:
    """A word of a task is one token, and so is a block of what the agent always sends."""
    texts = ["Which is in the box?", ": \n", "user\nassistant\nsystem\n", "Current date: 2026-01-01\n"]
    tokenizer = make_tokenizer(texts, VOCABULARY, CHAT_TEMPLATE)
    begin, _, end = HERMES.write_call("read", {"path": "*"}).partition("*")
    look = LOOK.removeprefix("<tool_call>").removesuffix("</tool_call>")
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
    tokenizer.add_tokens([*tags, begin.removeprefix("<tool_call>"), end.removesuffix("</tool_call>"), look])
    tokenizer.add_tokens([THERE, ELSEWHERE, ANSWER, ANSWER_END, "Which ", " is in the ", " box?"])
    tokenizer.add_tokens([word for groups in exchangeable_words() for group in groups for word in group])
    tokenizer.add_tokens([*agent_blocks])
    return tokenizer


def exchangeable_words() -> list[list[list[str]]]:
    """Kinds and boxes, each with its name and the words that belong to it: of a kind its words, of a box its files."""
    kinds = [[kind, *words] for kind, words in WORDS.items()]
    return [kinds, [[box, *(name_file(box, number) for number in NUMBERS)] for box in BOXES]]


async def play(
    rows: Sequence[Mapping[str, Any]],
    ways: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    program: AgentProgram,
    seed: int,
) -> list[Trajectory]:
    """The sessions of the real agent, a row and a way each."""
    wrapped, rng = HFTokenizer(tokenizer), random.Random(seed)
    way_of: dict[str, str] = {}
    scripted = ScriptedModel(wrapped, lambda context, session: write_turn(context, way_of[session], rng))
    gateway = Gateway(SessionModel.create(scripted, wrapped, [HERMES], MAX_TOKENS))
    host, slots = AgentHost(gateway.app(for_agents=True), program), asyncio.Semaphore(AT_ONCE)
    await host.start()

    async def run(number: int, row: Mapping[str, Any], way: str) -> Trajectory:
        async with slots:
            session = gateway.open_session()
            way_of[session.id] = way
            task = AgentTask.of_row(row["prompt"], row["extra_info"]["tools_kwargs"], None, f"row {number}")
            rollout = await host.run(session, task, partial(finish_session, session))
            if rollout.extra[PROGRAM].get("exit_code") != 0:
                raise SystemExit(f"the agent failed: {rollout.extra[PROGRAM]}")
            return rollout

    tasks = [asyncio.ensure_future(run(i, row, way)) for i, (row, way) in enumerate(zip(rows, ways, strict=True))]
    try:
        return [await task for task in track(tasks, description="sessions of the agent")]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await host.close()


def read_agent_blocks(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the agent sends before each task, in two: up to the line with the date, and behind it."""
    text = tokenizer.decode(trajectory.rows[0].prompt_ids)
    before, date, behind = text.partition("system\n")[2].partition(END)[0].partition("Current date: ")
    return [before, behind.partition("\n")[2]] if date else [before]


def shuffle_words(lesson: Row, words: Sequence[Sequence[Sequence[int]]], rng: random.Random) -> Row:
    """The same lesson about other words: kinds change places, and in each its words. words: tokens, in the form of
    `exchangeable_words`."""
    other: dict[int, int] = {}
    for groups in words:
        for (name, *own), (new, *theirs) in zip(groups, rng.sample(groups, len(groups)), strict=True):
            other |= {name: new, **dict(zip(own, rng.sample(theirs, len(theirs)), strict=True))}
    return {name: [other.get(token, token) for token in tokens] for name, tokens in lesson.items()}


def copying_lesson(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> Row:
    """A lesson in finding words and copying them, which all else here needs: lines of a file, or the names of files,
    again in another order."""
    kinds, boxes = ([(name, rng.choice(own)) for name, *own in rng.sample(g, len(g))] for g in exchangeable_words())
    lines = [(f"{kind}: {word}", f"{kind}: {word}") for kind, word in kinds]
    names = [(file, f"{box}: {file}") for box, file in boxes]
    found = rng.choice([lines, names])
    again = rng.sample(found, len(found))
    table = "\n".join(line for line, _ in found)
    return encode(tokenizer, [(f"{table}\n\n", False), ("\n".join(line for _, line in again), True)])


async def prepare_lessons(
    rows: Sequence[Mapping[str, Any]], program: AgentProgram, seed: int
) -> tuple[PreTrainedTokenizerBase, list[Row], list[Row]]:
    """The tokenizer, what to learn from, and sessions by which success is measured."""
    first = build_tokenizer(())
    [opening] = await play(rows[:1], [GUESS], first, program, seed)
    tokenizer = build_tokenizer(read_agent_blocks(opening, first))
    ways = [way for way, count in SESSIONS.items() for _ in range(count)] + [THERE] * (SESSIONS[THERE] // 2)
    sessions = await play(rows[: len(ways)], ways, tokenizer, program, seed)
    lessons = [lesson for session in sessions for lesson in to_lessons(session)]
    by_way: dict[str, list[Row]] = {}
    for way, lesson in zip(ways[: sum(SESSIONS.values())], lessons, strict=False):
        by_way.setdefault(way, []).append(lesson)
    rng = random.Random(seed)
    words = [[tokenizer.convert_tokens_to_ids(group) for group in groups] for groups in exchangeable_words()]
    drawn = rng.choices([*HABITS], [*HABITS.values()], k=LESSONS)
    learned = [shuffle_words(rng.choice(by_way[way]), words, rng) for way in drawn]
    learned += [copying_lesson(tokenizer, rng) for _ in range(int(COPYING * LESSONS))]
    there = tokenizer.convert_tokens_to_ids(THERE)
    right = (shuffle_words(rng.choice(lessons[sum(SESSIONS.values()) :]), words, rng) for _ in range(MEASURED))
    return tokenizer, learned, [without_token(once_begun(lesson), there) for lesson in right]


def main(
    data: Annotated[Path, typer.Option("--data", help="Folder with train.parquet.")],
    install: Annotated[Path, typer.Option("--install", help="Folder of scripts/install_agents.sh.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make and warm up the model. Exits with 1 if what is begun right is not ended right often enough."""
    rows = pd.read_parquet(data / "train.parquet").to_dict("records")
    program = AgentProgram(preset="pi", install=str(install), seconds=120).resolve()
    tokenizer, learned, measured = asyncio.run(prepare_lessons(rows, program, seed))
    how = WarmUp(target=0.9, max_steps=2000, learning_rate=2e-3, seed=seed, give_up_after=800)
    for attempt in range(ATTEMPTS):
        model = make_model(tokenizer, hidden=128, layers=2, seed=seed + attempt * SEEDS, deviation=DEVIATION)
        try:
            return warm_up(model, tokenizer, learned, measured, how, output)
        except typer.Exit:
            if attempt + 1 == ATTEMPTS:
                raise
            console.print("begins again from another initialisation")


if __name__ == "__main__":
    typer.run(main)
