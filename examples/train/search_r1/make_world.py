"""An invented world: pages about people for a search tool, and questions of one and two hops about them.

    python examples/train/search_r1/make_world.py --output outputs/search_r1/world

A page tells where somebody lives, what they work as, and who their teacher is. Where a teacher lives stands on the
teacher's page only, so that a question about that takes two searches. People are drawn anew for each seed: what is
asked stands nowhere but on the pages. Those whom the test questions are about, and their teachers, appear in no
training question and on no page that leads to an answer of one.

Written are ``corpus.jsonl`` in the form of Search-R1's corpora, and ``questions/train.jsonl`` and
``questions/test.jsonl`` in that of its questions.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

_ONSETS = ("B", "D", "F", "G", "H", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Z")
FIRST_NAMES = tuple(onset + rest for rest in ("ada", "elin", "oro") for onset in _ONSETS)
LAST_NAMES = tuple(onset + rest for rest in ("abrik", "undal", "ivost") for onset in _ONSETS)
TOWNS = tuple(onset + rest for rest in ("orgen", "ulby") for onset in _ONSETS)
TRADES = (
    *("baker", "banker", "barber", "brewer", "butcher", "carver", "cobbler", "cook", "dancer", "doctor", "driver"),
    *("farmer", "fisher", "guard", "hunter", "judge", "mason", "miller", "miner", "nurse", "painter", "pilot"),
    *("potter", "sailor", "singer", "smith", "tailor", "tanner", "weaver", "writer"),
)
WORDS = (*FIRST_NAMES, *LAST_NAMES, *TOWNS, *TRADES)
"""All that a page can tell; no word is twice among them."""
PEOPLE = 2000
HELD_OUT = 256
"""Of them; the test questions are about these."""
HOME, TRADE, TEACHER = "home", "trade", "teacher"
KINDS = ((HOME,), (TRADE,), (TEACHER, HOME), (TEACHER, TRADE))
"""What is asked about somebody: a fact that stands on their page, or one of whom that names."""
DATA_SOURCES = {1: "one_hop", 2: "two_hop"}
_PAGE = "{name}: home {home}, trade {trade}, teacher {teacher}."
_ON_PAGE = re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\w+(?: \\w+)?)", re.escape(_PAGE).replace(r"\ ", " ")))


@dataclass(frozen=True)
class Person:
    """One page."""

    name: str
    home: str
    trade: str
    teacher: str
    """A name."""

    @property
    def contents(self) -> str:
        """The page. The name stands on it twice, and on those of others once: by words, a name finds its own page."""
        return f"{self.name}\n{_PAGE.format(**asdict(self))}"

    @classmethod
    def on(cls, text: str) -> Person:
        """Of whom the text tells. Raises ValueError if it is of nobody."""
        found = _ON_PAGE.search(text)
        if found is None:
            raise ValueError(f"this is the page of nobody: {text!r:.200}")
        return cls(**found.groupdict())


@dataclass(frozen=True)
class Question:
    """A question, and the way to its answer."""

    person: str
    """Whom it names."""
    path: tuple[str, ...]
    """One of `KINDS`."""

    @property
    def text(self) -> str:
        """In words."""
        *between, what = self.path
        whom = "".join(f"the {who} of " for who in between) + self.person
        return f"What is the {what} of {whom}?"

    def pages(self, world: Mapping[str, Person]) -> list[Person]:
        """Those that must be read, in their order."""
        found = [world[self.person]]
        for who in self.path[:-1]:
            found.append(world[getattr(found[-1], who)])
        return found

    def answer(self, world: Mapping[str, Person]) -> str:
        """Of the last of those pages."""
        return str(getattr(self.pages(world)[-1], self.path[-1]))

    def as_source_row(self, world: Mapping[str, Person]) -> dict[str, Any]:
        """In the form of Search-R1's data."""
        return {
            "id": "/".join((self.person, *self.path)),
            "question": self.text,
            "golden_answers": [self.answer(world)],
            "data_source": DATA_SOURCES[len(self.path)],
        }

    @classmethod
    def of(cls, identity: str) -> Question:
        """The question whose row has this ``id``."""
        person, *path = identity.split("/")
        return cls(person, tuple(path))


def people(names: Sequence[str], rng: random.Random) -> dict[str, Person]:
    """A page for each name; teachers are among them."""
    return {name: Person(name, rng.choice(TOWNS), rng.choice(TRADES), _teacher(name, names, rng)) for name in names}


def _teacher(name: str, names: Sequence[str], rng: random.Random) -> str:
    """Who shares no part of the name: then all of a name stands nowhere as often as on its own page, and finds it."""
    while not set(name.split()).isdisjoint((drawn := rng.choice(names)).split()):
        pass
    return drawn


def questions(names: Iterable[str], size: int, rng: random.Random) -> list[Question]:
    """So many, as many of each of `KINDS`, in random order. Raises ValueError if there are not so many."""
    each = size // len(KINDS)
    names = list(names)
    if each > len(names):
        raise ValueError(f"{size} questions of {len(KINDS)} kinds need {each} people, and there are {len(names)}")
    found = [Question(name, path) for path in KINDS for name in rng.sample(names, each)]
    rng.shuffle(found)
    return found


@dataclass(frozen=True)
class World:
    """Pages by name, and questions by split."""

    pages: dict[str, Person]
    questions: dict[str, list[Question]]

    @classmethod
    def drawn(cls, seed: int, train_size: int, test_size: int) -> World:
        """One of many."""
        rng = random.Random(seed)
        names = [f"{first} {last}" for first, last in itertools.product(FIRST_NAMES, LAST_NAMES)]
        rng.shuffle(names)
        held_out, others = names[:HELD_OUT], names[HELD_OUT:PEOPLE]
        asked = {"train": questions(others, train_size, rng), "test": questions(held_out, test_size, rng)}
        pages = people(held_out, rng) | people(others, rng)
        # The order of the corpus tells nothing about who is held out.
        return cls({name: pages[name] for name in sorted(pages)}, asked)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def main(
    output: Annotated[Path, typer.Option("--output", help="Folder for the world.")],
    train_size: Annotated[int, typer.Option("--train_size", min=len(KINDS), help="Training questions.")] = 6400,
    test_size: Annotated[int, typer.Option("--test_size", min=len(KINDS), help="Held-out questions.")] = 256,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same world.")] = 0,
) -> None:
    """Make the pages and the questions."""
    world = World.drawn(seed, train_size, test_size)
    pages = ({"id": str(i), "contents": person.contents} for i, person in enumerate(world.pages.values()))
    write_lines(output / "corpus.jsonl", pages)
    for split, asked in world.questions.items():
        write_lines(output / "questions" / f"{split}.jsonl", (one.as_source_row(world.pages) for one in asked))


if __name__ == "__main__":
    typer.run(main)
