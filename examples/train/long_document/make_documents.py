"""Invented diaries of several pages, and questions about lines of two of the pages.

    python examples/train/long_document/make_documents.py --output outputs/long_document/source

Each page names a bird, a tree and so on. The question asks for one line of an early page and for one of a page behind
the second. All words are drawn anew for each page, so that no answer can be learned by heart.

The script writes ``train.jsonl`` and ``test.jsonl`` with the columns of MemAgent's data: `prompt`, `context` and
`reward_model`. The pages of a document are the paragraphs of `context`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

WORDS = {
    "bird": ("crow", "duck", "eagle", "finch", "goose", "heron", "lark", "owl", "raven", "robin", "stork", "swan"),
    "tree": ("alder", "ash", "beech", "birch", "cedar", "elm", "fir", "lime", "maple", "oak", "pine", "willow"),
    "dish": ("beans", "bread", "cake", "cheese", "eggs", "fish", "pasta", "pie", "rice", "salad", "soup", "stew"),
    "tool": ("axe", "brush", "drill", "file", "hammer", "ladder", "nail", "plane", "rake", "rope", "saw", "spade"),
    "town": ("Bern", "Bonn", "Cork", "Genoa", "Graz", "Lyon", "Oslo", "Paris", "Porto", "Riga", "Turin", "York"),
    "game": ("bingo", "bowls", "chess", "darts", "golf", "go", "hockey", "poker", "polo", "rugby", "tag", "whist"),
}
"""What the lines of a page may hold, by kind."""
BEHIND_PAGE = 2
"""The second line that is asked for is not on one of the first pages."""


@dataclass(frozen=True)
class Document:
    """Its pages, and the two lines that are asked for."""

    pages: tuple[dict[str, str], ...]
    """A word of each kind."""
    asked: tuple[tuple[str, int], tuple[str, int]]
    """Kind, and page from 1."""

    @property
    def question(self) -> str:
        """Return the question."""
        (first, early), (second, later) = self.asked
        return f"Which {first} is on page {early}, and which {second} on page {later}?"

    @property
    def answer(self) -> str:
        """Return both lines, in the order of the question."""
        return ", ".join(f"{kind} {self.pages[page - 1][kind]}" for kind, page in self.asked)

    @classmethod
    def draw(cls, pages: int, rng: random.Random) -> Document:
        """Draw a document with so many pages."""
        later = rng.randint(BEHIND_PAGE + 1, pages)
        kinds = rng.sample([*WORDS], 2)
        told = ({kind: rng.choice(words) for kind, words in WORDS.items()} for _ in range(pages))
        return cls(tuple(told), ((kinds[0], rng.randint(1, later - 1)), (kinds[1], later)))

    def as_source_row(self) -> dict[str, Any]:
        """Return the row with MemAgent's columns."""
        pages = ("\n".join(f"- {kind} {word}" for kind, word in page.items()) for page in self.pages)
        return {
            "prompt": [{"role": "user", "content": self.question}],
            "context": "\n\n".join(pages),
            "reward_model": {"style": "rule", "ground_truth": [self.answer]},
        }


def main(
    output: Annotated[Path, typer.Option("--output", help="Folder for the documents.")],
    train_size: Annotated[int, typer.Option("--train_size", min=1, help="Documents to train on.")] = 2000,
    test_size: Annotated[int, typer.Option("--test_size", min=1, help="Held-out documents.")] = 256,
    pages: Annotated[int, typer.Option("--pages", min=BEHIND_PAGE + 1, help="Pages of a document.")] = 5,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same documents.")] = 0,
) -> None:
    """Make the documents."""
    rng = random.Random(seed)
    output.mkdir(parents=True, exist_ok=True)
    for split, size in (("train", train_size), ("test", test_size)):
        rows = (Document.draw(pages, rng).as_source_row() for _ in range(size))
        (output / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
