"""Databases and pages that four tools look into, and questions that one of the tools answers.

    python examples/train/multi_tool/tool_world.py --output outputs/world

A question is a task for one tool with something that the tool is applied to: a sum for the calculator, two words whose
letters a program adds up, an animal whose weight the row's database tells, or somebody whose town a page tells. No
question of the test split is in the train split, and neither is its database.
"""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from verl_tool.retrieval.corpus import Corpus
from verl_tool.retrieval.index_builder import build
from verl_tool.retrieval.manifest import BuildSettings, Kind

CALCULATOR, SEARCH, SQL, PYTHON = TOOLS = ("calculator", "search", "sql", "python")
"""The tags of the tools, and what the questions are called that they answer."""
FIRST_NAMES = (
    *("anna", "bert", "carl", "dora", "emil", "fred", "gina", "hugo", "ida", "jack", "kate", "leo"),
    *("mara", "nina", "otto", "paul", "rosa", "sam", "tina", "ugo", "vera", "will", "yara", "zoe"),
)
LAST_NAMES = (
    *("berg", "dahl", "falk", "frost", "gren", "hill", "holm", "kern", "lind", "lund", "moor", "nord"),
    *("ost", "park", "quist", "rask", "rose", "skog", "stein", "strand", "thal", "vik", "west", "wood"),
)
TOWNS = (
    *("athens", "berlin", "bern", "cairo", "delhi", "dublin", "geneva", "lima", "lisbon", "london"),
    *("madrid", "milan", "oslo", "paris", "prague", "rome", "seoul", "tokyo", "vienna", "zurich"),
)
ANIMALS = (
    *("bear", "camel", "cow", "crane", "deer", "dog", "donkey", "eagle", "fox", "goat", "goose", "hare"),
    *("horse", "lion", "lynx", "moose", "otter", "owl", "panda", "pig", "seal", "swan", "tiger", "wolf"),
)
WORDS = (
    *("apple", "badge", "beach", "bread", "cabin", "cable", "candle", "cloud", "dance", "garden", "house", "island"),
    *("lemon", "market", "needle", "ocean", "paper", "peach", "pearl", "river", "stone", "table", "tower", "window"),
    *("anchor", "basket", "bridge", "button", "castle", "corner", "field", "flower", "forest", "hammer", "ladder"),
    *("mirror", "pencil", "pocket", "ribbon", "saddle", "shadow", "silver", "spoon", "ticket", "valley", "wagon"),
)
MODULUS = 97
NUMBERS = range(10, 100)
"""What is asked for: a tiny model copies long numbers badly."""
DATABASES = {"train": 64, "test": 16}


@dataclass(frozen=True)
class Task:
    """A question, and all that is known of it."""

    tool: str
    """Which answers it, one of `TOOLS`."""
    thing: str
    """What the tool is applied to."""
    answer: str
    db_id: str
    """Of the database that the tool `sql` sees, if it is asked."""

    @property
    def problem(self) -> tuple[str, ...]:
        """The same for the same question, in whatever order its numbers or words are, with the same answer."""
        asked = (self.tool, *sorted(self.thing.split()))
        return (*asked, self.db_id) if self.tool == SQL else asked

    @property
    def question(self) -> str:
        """In words."""
        return QUESTIONS[self.tool].format(self.thing)


QUESTIONS = {
    CALCULATOR: "What is {}?",
    SEARCH: "Where does {} live?",
    SQL: "How heavy is '{}'?",
    PYTHON: f'Add up the letters of "{{}}" modulo {MODULUS}.',
}


def call(tool: str, thing: str) -> str:
    """How the tool is asked about that, whether or not it knows."""
    payload = {
        CALCULATOR: " {}",
        SEARCH: " {}",
        SQL: "SELECT kilos FROM animals WHERE name = '{}'",
        PYTHON: f'print(sum(map(ord, "{{}}")) % {MODULUS})',
    }[tool]
    return f"<{tool}>{payload.format(thing)}</{tool}>"


class World:
    """All databases and pages of a seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.weights = {
            f"{split}_{number}": dict(zip(ANIMALS, rng.sample(NUMBERS, len(ANIMALS)), strict=True))
            for split, size in DATABASES.items()
            for number in range(size)
        }
        """Of each animal, by database."""
        self.homes = {f"{first} {last}": rng.choice(TOWNS) for first in FIRST_NAMES for last in LAST_NAMES}

    def write(self, folder: Path) -> None:
        """``databases/``, ``corpus.jsonl`` and ``index/``."""
        (folder / "databases").mkdir(parents=True, exist_ok=True)
        for db_id, weights in self.weights.items():
            file = folder / "databases" / f"{db_id}.sqlite"
            file.unlink(missing_ok=True)
            with closing(sqlite3.connect(file)) as connection, connection:
                connection.execute("CREATE TABLE animals (name TEXT, kilos INTEGER)")
                connection.executemany("INSERT INTO animals VALUES (?, ?)", weights.items())
        corpus = folder / "corpus.jsonl"
        pages = (
            {"id": str(number), "contents": f"{name}\n{name} lives in {town}."}
            for number, (name, town) in enumerate(self.homes.items())
        )
        corpus.write_text("".join(f"{json.dumps(page)}\n" for page in pages), encoding="utf-8")
        settings = BuildSettings(
            corpus=str(corpus.resolve()), corpus_fingerprint=Corpus(corpus.resolve()).fingerprint, kind=Kind.bm25
        )
        build(settings, folder / "index", lambda stage, share: None)

    def drawn(self, tool: str, split: str, rng: random.Random) -> Task:
        """One of the tool's questions."""
        db_id = rng.choice([each for each in self.weights if each.startswith(split)])
        if tool == CALCULATOR:
            total = rng.randint(2 * NUMBERS[0], NUMBERS[-1])
            first = rng.randint(NUMBERS[0], total - NUMBERS[0])
            return Task(tool, f"{first} + {total - first}", str(total), db_id)
        if tool == PYTHON:
            words = " ".join(rng.sample(WORDS, 2))
            while sum(map(ord, words)) % MODULUS not in NUMBERS:
                words = " ".join(rng.sample(WORDS, 2))
            return Task(tool, words, str(sum(map(ord, words)) % MODULUS), db_id)
        known = self.homes if tool == SEARCH else self.weights[db_id]
        thing, answer = rng.choice(list(known.items()))
        return Task(tool, thing, str(answer), db_id)

    def tasks(self, split: str, number: int, held_out: frozenset[tuple[str, ...]], rng: random.Random) -> list[Task]:
        """So many, as many for each tool, all different and none of `held_out`.

        Raises ValueError if there are not so many.
        """
        found: dict[tuple[str, ...], Task] = {}
        for tool in TOOLS:
            wanted = len(found) + number // len(TOOLS)
            for _ in range(50 * number):
                task = self.drawn(tool, split, rng)
                if task.problem not in held_out and len(found) < wanted:
                    found[task.problem] = task
            if len(found) < wanted:
                raise ValueError(f"there are no {number // len(TOOLS)} questions for {tool}; take fewer rows")
        return rng.sample(list(found.values()), len(found))


def main(
    output: Annotated[Path, typer.Option("--output", help="Folder for databases, pages, index and questions.")],
    train_size: Annotated[int, typer.Option("--train_size", min=4, help="Questions to train on.")] = 1600,
    test_size: Annotated[int, typer.Option("--test_size", min=4, help="Held-out questions.")] = 256,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same world.")] = 0,
) -> None:
    """Make the world, and its questions: questions/train.jsonl and questions/test.jsonl."""
    world, rng = World(seed), random.Random(f"questions {seed}")
    world.write(output)
    test = world.tasks("test", test_size, frozenset(), rng)
    train = world.tasks("train", train_size, frozenset(task.problem for task in test), rng)
    (output / "questions").mkdir(exist_ok=True)
    for split, tasks in (("train", train), ("test", test)):
        text = "".join(f"{json.dumps(asdict(task) | {'question': task.question})}\n" for task in tasks)
        (output / "questions" / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
