"""Requests in which one detail is missing, for the environment `user` and the domain of examples/train/ask_the_user.

    python examples/data_preprocess/ask_the_user.py --local_dir data/ask_the_user

A user orders an item of a colour to a town, and names two of the three. Asked for the third, the user says it. No order
of the test split is in the train split, whichever detail is missing.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rows import LocalDir, Row, row, run, save

from verl_tool.verification import ENVIRONMENT_STYLE

DATA_SOURCE = "ask_the_user"
SYSTEM = "Order what the user wants. Ask for what the user did not say; do not guess. Then name the price."
WORDS = {
    "item": ("bag", "bowl", "chair", "clock", "desk", "fan", "lamp", "mug", "rug", "vase"),
    "colour": ("black", "blue", "brown", "gold", "green", "grey", "pink", "red", "white", "yellow"),
    "town": ("Bern", "Bonn", "Cork", "Genoa", "Graz", "Lyon", "Oslo", "Paris", "Riga", "York"),
}
"""What an order consists of. Each kind is also the word by which it is asked for."""
REQUESTS = {
    "item": ("Send something {colour} to {town}.", "I need a {colour} thing in {town}."),
    "colour": ("Send a {item} to {town}.", "I need a {item} in {town}."),
    "town": ("Send me a {colour} {item}.", "I need a {colour} {item}."),
}
"""What the user says first, by what is missing."""
PRICES = range(5, 100, 5)
KNOWN = "I said it."
"""The answer to a question for what the user named."""
END_WORD = "price"
"""The user leaves when the policy names it."""


@dataclass(frozen=True)
class Request:
    """An order, and what of it the user does not say."""

    order: dict[str, str]
    missing: str
    wording: str
    prices: dict[str, int]

    @property
    def text(self) -> str:
        return self.wording.format(**self.order)

    def environment(self) -> dict[str, Any]:
        """Return what the environment is sent at the beginning."""
        answers = {kind: f"{self.order[kind]}." if kind == self.missing else KNOWN for kind in WORDS}
        slots = [{"about": [kind], "answer": answer} for kind, answer in answers.items()]
        script = {"first": self.text, "slots": slots, "ends": [END_WORD]}
        return {"name": "user", "script": script, "database": {"prices": self.prices, "orders": []}}

    def ground_truth(self) -> dict[str, Any]:
        """Return what the environment judges by."""
        price = str(self.prices[self.order["item"]])
        return {"actions": [{"name": "order", "arguments": self.order}], "outputs": [price]}

    @classmethod
    def draw(cls, order: dict[str, str], rng: random.Random) -> Request:
        """Leave out one detail of an order, and draw the prices."""
        missing = rng.choice([*WORDS])
        prices = {item: rng.choice(PRICES) for item in WORDS["item"]}
        return cls(order, missing, rng.choice(REQUESTS[missing]), prices)


def split_requests(train_size: int, test_size: int, seed: int) -> dict[str, list[Request]]:
    """Return the requests of both splits. Raises ValueError if there are too few orders for the test."""
    rng = random.Random(seed)
    orders = [
        {"item": item, "colour": colour, "town": town}
        for item in WORDS["item"]
        for colour in WORDS["colour"]
        for town in WORDS["town"]
    ]
    if test_size >= len(orders):
        raise ValueError(f"test_size is {test_size}, and there are {len(orders)} orders in all; take fewer")
    rng.shuffle(orders)
    test, train = orders[:test_size], orders[test_size:]
    return {
        "train": [Request.draw(rng.choice(train), rng) for _ in range(train_size)],
        "test": [Request.draw(order, rng) for order in test],
    }


def as_row(request: Request, split: str, index: int) -> Row:
    """Return the row of a request."""
    extra = {"missing": request.missing, "tools_kwargs": {"environment": json.dumps(request.environment())}}
    made = row(DATA_SOURCE, [{"role": "system", "content": SYSTEM}], "dialogue", "", split, index, extra)
    truth = json.dumps(request.ground_truth())
    return {**made, "reward_model": {"style": ENVIRONMENT_STYLE, "ground_truth": truth}}


def main(
    local_dir: LocalDir = Path("data/ask_the_user"),
    train_size: Annotated[int, typer.Option("--train_size", min=1, help="Requests to train on.")] = 2000,
    test_size: Annotated[int, typer.Option("--test_size", min=1, help="Held-out requests.")] = 128,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same requests.")] = 0,
) -> None:
    """Make the data set."""
    splits = split_requests(train_size, test_size, seed)
    save({name: [as_row(each, name, i) for i, each in enumerate(found)] for name, found in splits.items()}, local_dir)


if __name__ == "__main__":
    run(main)
