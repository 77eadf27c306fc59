"""Tasks with files: find the file of a box, and read there what is asked for.

    python examples/train/unmodified_agent/make_boxes.py --local_dir outputs/unmodified_agent/data

The folder of a task has a file for each box, such as ``red-4.txt``, whose number only a look into the folder tells.
Numbers and contents are drawn anew for each task, so that no answer can be learned by heart.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).resolve().parents[2] / "data_preprocess"))
from rows import LocalDir, Row, Seed, convert, messages, row, run, save

from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.protocol import FILES_FIELD

WORDS = {
    "bird": ("crow", "duck", "eagle", "finch", "goose", "heron", "lark", "owl", "raven", "robin", "stork", "swan"),
    "tree": ("alder", "ash", "beech", "birch", "cedar", "elm", "fir", "lime", "maple", "oak", "pine", "willow"),
    "dish": ("beans", "bread", "cake", "cheese", "eggs", "fish", "pasta", "pie", "rice", "salad", "soup", "stew"),
    "tool": ("axe", "brush", "drill", "hammer", "ladder", "nail", "plane", "rake", "rope", "saw", "spade", "wedge"),
    "town": ("Bern", "Bonn", "Cork", "Genoa", "Graz", "Lyon", "Oslo", "Paris", "Porto", "Riga", "Turin", "York"),
    "game": ("bingo", "bowls", "chess", "darts", "golf", "hockey", "poker", "polo", "rugby", "snooker", "tag", "whist"),
}
"""What may be in a box, by kind."""
BOXES = ("blue", "green", "grey", "pink", "red", "white")
NUMBERS = range(10)


def name_file(box: str, number: int) -> str:
    """Return the name of a box's file."""
    return f"{box}-{number}.txt"


@dataclass(frozen=True)
class Task:
    """A question and the files that answer it."""

    kind: str
    box: str
    numbers: dict[str, int]
    """Of each box."""
    contents: dict[str, dict[str, str]]
    """Of each box: a word of each kind."""

    @property
    def question(self) -> str:
        """Return the question."""
        return f"Which {self.kind} is in the {self.box} box?"

    @property
    def answer(self) -> str:
        """Return the answer."""
        return self.contents[self.box][self.kind]

    @property
    def files(self) -> dict[str, str]:
        """Return the texts of the files by name."""
        texts = {
            box: "".join(f"{kind}: {word}\n" for kind, word in inside.items()) for box, inside in self.contents.items()
        }
        return {name_file(box, self.numbers[box]): text for box, text in texts.items()}

    @classmethod
    def draw(cls, rng: random.Random) -> Task:
        """Draw a task."""
        contents = {box: {kind: rng.choice(WORDS[kind]) for kind in rng.sample([*WORDS], len(WORDS))} for box in BOXES}
        return cls(rng.choice([*WORDS]), rng.choice(BOXES), {box: rng.choice(NUMBERS) for box in BOXES}, contents)


def as_row(source: Mapping[str, Any], split: str, index: int) -> Row:
    """One row of a task."""
    task: Task = source["task"]
    packed = pack_files({name: PackedFile(text.encode()) for name, text in task.files.items()})
    extra = {"tools_kwargs": {FILES_FIELD: packed}}
    golden = json.dumps([task.answer])
    return row("unmodified_agent", messages(None, task.question), "files", golden, split, index, extra)


def main(
    local_dir: LocalDir,
    train_size: Annotated[int, typer.Option("--train_size", min=1, help="Tasks to train on.")] = 1000,
    test_size: Annotated[int, typer.Option("--test_size", min=1, help="Held-out tasks.")] = 64,
    seed: Seed = 0,
) -> None:
    """Make train.parquet and test.parquet."""
    rng = random.Random(seed)
    sizes = {"train": train_size, "test": test_size}
    save(
        convert({split: [{"task": Task.draw(rng)} for _ in range(size)] for split, size in sizes.items()}, as_row),
        local_dir,
    )


if __name__ == "__main__":
    run(main)
