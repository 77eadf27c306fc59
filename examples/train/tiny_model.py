"""A tiny model to try a recipe on without an accelerator.

    python examples/train/tiny_model.py --data data/train.parquet --output outputs/model
    python examples/train/tiny_model.py --traces traces.jsonl --tool_type reverse.py --output outputs/model

A byte-level tokenizer with Qwen2's chat template and a Qwen3-style model are made from scratch (`from_scratch.py`) and
trained by supervised learning on solutions of the recipe's own rows (`traces.py`), or on example trajectories for a
tool of one's own (`own_traces.py`), until a solution comes out right with the wanted probability. What is left to learn
is left to reinforcement learning.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from from_scratch import END, Row, WarmUp, console, encode, make_model, make_tokenizer, warm_up
from own_traces import read_traces, stops_in, with_observations
from rich.markup import escape
from traces import Part, Trace, traces_of
from transformers import PreTrainedTokenizerBase

from verl_tool.errors import VerlToolError

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MEASURED_LESSONS = 64


@dataclass(frozen=True)
class Lesson:
    """A prompt, and ways to go about it."""

    messages: list[dict[str, str]]
    traces: list[Trace]


def lessons_in(files: Sequence[Path]) -> list[Lesson]:
    """Of all rows with a known solution. Raises ValueError if there is none."""
    rows = [row for file in files for row in pd.read_parquet(file).to_dict("records")]
    found = [Lesson([dict(message) for message in row["prompt"]], traces_of(row)) for row in rows]
    known = [lesson for lesson in found if lesson.traces]
    if not known:
        raise ValueError(f"no row of {', '.join(map(str, files))} has a solution that traces.py knows")
    return known


def lessons_of(path: Path, tool_type: str) -> list[Lesson]:
    """Of traces of one's own, whose tool is asked for its answers. Raises VerlToolError."""
    own = read_traces(path)
    traces = asyncio.run(with_observations(own, tool_type))
    stops = ",".join(repr(stop) for stop in stops_in(own, tool_type))
    console.print(f"train it with actor_rollout_ref.agent.action_stop_tokens=[{stops}]", markup=False, highlight=False)
    return [Lesson(each.messages, [trace]) for each, trace in zip(own, traces, strict=True)]


def lessons_from(data: str | None, traces: Path | None, tool_type: str | None) -> list[Lesson]:
    """Of the one that is given. Raises VerlToolError, or ValueError."""
    if (data is None) == (traces is None) or (traces is None) != (tool_type is None):
        raise ValueError("give --data, or --traces and --tool_type")
    if traces is not None and tool_type is not None:
        return lessons_of(traces, tool_type)
    return lessons_in([Path(file) for file in (data or "").strip("[]").split(",")])


def texts_of(lessons: Sequence[Lesson]) -> list[str]:
    """What the tokenizer learns from."""
    texts = [m["content"] for lesson in lessons for m in [{"content": "system\nuser\nassistant\n"}, *lesson.messages]]
    return texts + [part.text.removesuffix(END) for lesson in lessons for trace in lesson.traces for part in trace]


def learned(part: Part) -> bool:
    """What the model is taught: all that it writes."""
    return part.learned


def measured(part: Part) -> bool:
    """What the model's success is measured by: what it writes where only one thing is right."""
    return part.learned and not part.free


def encode_lesson(tokenizer: PreTrainedTokenizerBase, lesson: Lesson, wanted: Callable[[Part], bool]) -> list[Row]:
    """The prompt as the chat template has it, then a trace; one row for each, labelled where a part is wanted."""
    prompt = tokenizer.apply_chat_template(lesson.messages, add_generation_prompt=True, tokenize=False)
    # A trace that is there several times is encoded once.
    encoded = {
        id(trace): encode(tokenizer, [(prompt, False), *((part.text, wanted(part)) for part in trace)])
        for trace in lesson.traces
    }
    return [encoded[id(trace)] for trace in lesson.traces]


def main(
    output: Annotated[Path, typer.Option("--output", help="Folder for the model.")],
    data: Annotated[str | None, typer.Option("--data", help="Parquet files of verl's rows: a path, or [a,b].")] = None,
    traces: Annotated[
        Path | None,
        typer.Option("--traces", help="Or example trajectories of one's own, JSON lines: see own_traces.py."),
    ] = None,
    tool_type: Annotated[
        str | None, typer.Option("--tool_type", help="With --traces: the tools, as for the tool server.")
    ] = None,
    target: Annotated[float, typer.Option("--target", min=0.0, max=1.0, help="Stop at this success, sampled.")] = 0.3,
    max_steps: Annotated[int, typer.Option("--max_steps", min=1, help="Give up after so many steps.")] = 600,
    batch_size: Annotated[int, typer.Option("--batch_size", min=1)] = 32,
    learning_rate: Annotated[float, typer.Option("--learning_rate")] = 2e-3,
    vocabulary: Annotated[int, typer.Option("--vocabulary", min=300, help="Most tokens.")] = 640,
    hidden: Annotated[int, typer.Option("--hidden", min=32, help="Width; a multiple of 32.")] = 128,
    layers: Annotated[int, typer.Option("--layers", min=1)] = 2,
    deviation: Annotated[
        float,
        typer.Option("--deviation", min=0.0, help="Of the weights at the start; 0.05 makes it copy after fewer steps."),
    ] = 0.02,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Make a tiny model and teach it the form of the recipe's solutions. Exits with 1 if `target` is not reached."""
    try:
        lessons = lessons_from(data, traces, tool_type)
    except (VerlToolError, ValueError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from None
    tokenizer = make_tokenizer(texts_of(lessons), vocabulary, CHAT_TEMPLATE)
    model = make_model(tokenizer, hidden, layers, seed, deviation)
    rows = [row for lesson in lessons for row in encode_lesson(tokenizer, lesson, learned)]
    shown = random.Random(0).sample(lessons, min(MEASURED_LESSONS, len(lessons)))
    held = [encode_lesson(tokenizer, lesson, measured)[0] for lesson in shown]
    warm_up(model, tokenizer, rows, held, WarmUp(target, max_steps, learning_rate, seed, batch_size), output)


if __name__ == "__main__":
    typer.run(main)
