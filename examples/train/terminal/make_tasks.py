"""Tasks in Harbor's layout for a tiny model: find a number in the right file of the right folder, and write it down.

    python examples/train/terminal/make_tasks.py --output outputs/tasks

A workspace has some folders, and in each one file named after an animal, one after a plant, and so on: ``garden/fern``.
The instruction says after what the file is named, and not its name: it must be found before it can be read. No two
tasks have the same files.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

FOLDERS = ("attic", "barn", "cellar", "garden", "hall", "kitchen")
NAMES = {
    "an animal": ("bear", "deer", "hare", "wolf"),
    "a plant": ("fern", "iris", "moss", "rose"),
    "a tool": ("drill", "hammer", "lathe", "wrench"),
}
"""Of files, by what they are named after."""
FOLDERS_PER_TASK = 2
ANSWER_FILE = "answer"
QUESTION = (
    "In the {folder}, one file is named after {kind}. "
    "Write its name and the number in it into the file {file} of your home."
)
TASK = """\
version = "1.0"

[metadata]
category = "find-number"

[verifier]
timeout_sec = 10.0

[agent]
timeout_sec = 60.0
"""
TEST = """\
#!/bin/bash
# Name and number of the right file, and nothing else, must stand in the answer.
if [ "$(cat {file})" = "{answer}" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class FindNumber:
    """One task."""

    folder: str
    """In which the number is."""
    kind: str
    """What the file is named after, one of `NAMES`."""
    files: dict[str, str]
    """All contents, by path."""

    @property
    def instruction(self) -> str:
        """What the model is told."""
        return QUESTION.format(folder=self.folder, kind=self.kind, file=ANSWER_FILE)

    @property
    def path(self) -> str:
        """Of the right file."""
        return next(f"{self.folder}/{name}" for name in NAMES[self.kind] if f"{self.folder}/{name}" in self.files)

    @property
    def answer(self) -> str:
        """What must be written."""
        return f"{Path(self.path).name} {self.files[self.path].strip()}"

    @classmethod
    def drawn(cls, rng: random.Random) -> FindNumber:
        """One of many."""
        folders = rng.sample(FOLDERS, FOLDERS_PER_TASK)
        files = {
            f"{folder}/{rng.choice(names)}": f"{rng.randint(10, 99)}\n"
            for folder in folders
            for names in NAMES.values()
        }
        return cls(folders[0], rng.choice(list(NAMES)), files)

    def write(self, folder: Path) -> None:
        """As a task of Harbor's layout."""
        content = {
            "task.toml": TASK,
            "instruction.md": self.instruction + "\n",
            "tests/test.sh": TEST.format(file=ANSWER_FILE, answer=self.answer),
            "solution/solve.sh": f"#!/bin/bash\necho {self.answer} > {ANSWER_FILE}\n",
            **{f"environment/{path}": text for path, text in self.files.items()},
        }
        for path, text in content.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")


def tasks(number: int, seed: int) -> Iterator[FindNumber]:
    """So many, all different."""
    rng, seen = random.Random(seed), set()
    while len(seen) < number:
        task = FindNumber.drawn(rng)
        if (files := tuple(sorted(task.files.items()))) not in seen:
            seen.add(files)
            yield task


def main(
    output: Annotated[Path, typer.Option("--output", help="Folder for the tasks.")],
    size: Annotated[int, typer.Option("--size", min=1, help="Number of tasks.")] = 1728,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same tasks.")] = 0,
) -> None:
    """Make the tasks, each a folder of `output`."""
    for index, task in enumerate(tasks(size, seed)):
        task.write(output / f"find-number-{index:05}")


if __name__ == "__main__":
    typer.run(main)
