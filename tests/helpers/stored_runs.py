"""Folders of runs with a tokenizer, rows and stored trajectories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from real_tokenizers import byte_level
from run_folders import MODEL, run_folder
from typer.testing import CliRunner, Result

from verl_tool.agent_loop.trajectory import Author, CallRecord, Segment, StopReason, Trajectory
from verl_tool.replay.replay_cli import command

Turn = tuple[str, str]
"""The model's text and the tool's answer, which is empty without a call."""


TOKENIZER = byte_level([], eos_token="<|end|>")
"""One token per byte."""


def segment(author: Author, text: str) -> Segment:
    """Encode a text. The model's tokens have a log-probability each."""
    ids = tuple(TOKENIZER.encode(text))
    return Segment(author, ids, (-0.5,) * len(ids) if author is Author.MODEL else None, text)


def trajectory(index: int, question: str, turns: Sequence[Turn], reward: float | None, **told: Any) -> Trajectory:
    """Make an answer to the row `index`. `told` are the reward manager's details."""
    segments = [segment(Author.PROMPT, f"user: {question}\n")]
    calls: list[CallRecord] = []
    for text, observation in turns:
        segments.append(segment(Author.MODEL, text))
        if observation:
            calls.append(CallRecord(len(calls), text, observation, names=("calculator",), seconds=0.25))
            segments.append(segment(Author.TOOL, observation))
    made = Trajectory(f"t{index}", tuple(segments), StopReason.ANSWERED, calls=tuple(calls), reward=reward)
    return replace(made, extra={"index": index, "reward_extra_info": told})


def stored_run(folder: Path, rows: Sequence[tuple[str, str]], lines: Sequence[Trajectory], *overrides: str) -> Path:
    """Write a run with the reward manager `calculator`, questions and answers in `rows`, and `lines` of its first
    step."""
    data = folder / "train.jsonl"
    run = run_folder(
        folder,
        f"data.train_files={data}",
        f"data.val_files={data}",
        "reward.reward_manager.name=calculator",
        f"run_dir={folder / 'before_it_was_moved'}",
        *overrides,
    )
    write_rows(data, rows)
    TOKENIZER.save_pretrained(run / MODEL)
    (run / "trajectories").mkdir()
    (run / "trajectories/step_1.jsonl").write_text("".join(line.to_json() + "\n" for line in lines))
    return run


def write_rows(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Write rows as examples/data_preprocess does."""
    written = (
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": i},
        }
        for i, (question, answer) in enumerate(rows)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in written))


def replay(*arguments: object) -> Result:
    """Run the command `replay` in this process."""
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
