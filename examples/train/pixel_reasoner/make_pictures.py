"""Pictures with a digit that shows only from close by, and questions about them in the form of Pixel Reasoner's data.

    python examples/train/pixel_reasoner/make_pictures.py --output outputs/pictures

A picture of 128 x 128 pixels is dark but for a card in one of its quarters. The card carries a digit, woven of knots:
small patches of light and dark dots, of which nothing is left where a picture is scaled to half its width and height by
bicubic interpolation, as Qwen's processors do it. The model, which sees 64 x 64 pixels of any picture, sees a card that
is as blank as it would be with any other digit; a quarter that is cut out and shown by itself has all its dots.

Written are the pictures, in ``images/``, and ``train.jsonl`` and ``test.jsonl``. No picture of the one is in the other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

Grey = NDArray[np.int64]
"""Levels from 0 to 255. [height, width]"""

SIDE = 128
"""Pixels of a picture, across and down."""
QUARTER = SIDE // 2
SEEN = 64 * 64
"""Pixels of any picture as the model sees it: of the whole a fourth, and of a quarter all."""
QUESTION = "Which digit?"
FONT = (
    *("0E 11 13 15 19 11 0E", "04 0C 04 04 04 04 0E", "0E 11 01 02 04 08 1F", "1F 02 04 02 01 11 0E"),
    *("02 06 0A 12 1F 02 02", "1F 10 1E 01 01 11 0E", "06 08 10 1E 11 11 0E", "1F 01 02 04 08 08 08"),
    *("0E 11 11 0E 11 11 0E", "0E 11 11 0F 01 02 0C"),
)
"""The digits, of five columns and seven rows; a byte for each row."""
_DOTS = np.array([1, -3, 4, -4, 3, -1])
"""Two third differences beside each other. Weighted as bicubic interpolation to half the size weighs its pixels, they
sum up to 0 around every other pixel, if they begin at an odd one."""
KNOT: Grey = 7 * np.outer(_DOTS, _DOTS)
MARGIN = 5
"""Pixels of the card around its digit."""
JITTER = 4
"""Pixels by which a card is off the middle of its quarter, at most."""
CARD, GROUND = 128, 40
NOISE = 4.0
"""Standard deviation, in levels; none is more than three times that."""


def glyph(digit: int) -> Grey:
    """1 where the digit is. [7, 5]"""
    return np.array([[int(row, 16) >> (4 - x) & 1 for x in range(5)] for row in FONT[digit].split()])


@dataclass(frozen=True)
class Picture:
    """One picture."""

    digit: int
    quarter: int
    """Where the card is: 0 and 1 above, 2 and 3 below, from left to right."""
    across: int
    """By how many pixels the card is off the quarter's middle, to the right; an even number, as `down`."""
    down: int
    noise: int
    """Seed."""

    @classmethod
    def drawn(cls, rng: Generator) -> Picture:
        """Any."""
        digit, quarter, noise = (int(rng.integers(n)) for n in (10, 4, 2**32))
        across, down = (int(2 * each) for each in rng.integers(-JITTER // 2, JITTER // 2 + 1, 2))
        return cls(digit, quarter, across, down, noise)

    @property
    def box(self) -> tuple[int, int, int, int]:
        """The quarter with the card: left, top, right and bottom edge in pixels."""
        return box_of(self.quarter)

    def image(self) -> Image.Image:
        """As it is."""
        card = CARD + np.pad(np.kron(glyph(self.digit), KNOT), MARGIN)
        height, width = card.shape
        left, top, _, _ = self.box
        x, y = left + (QUARTER - width) // 2 + self.across, top + (QUARTER - height) // 2 + self.down
        grey = np.full((SIDE, SIDE), GROUND)
        grey[y : y + height, x : x + width] = card
        noise = np.random.default_rng(self.noise).normal(0, NOISE, grey.shape).clip(-3 * NOISE, 3 * NOISE)
        return Image.fromarray((grey + noise.round()).astype(np.uint8)).convert("RGB")


def box_of(quarter: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom edge of a quarter, in pixels."""
    left, top = quarter % 2 * QUARTER, quarter // 2 * QUARTER
    return left, top, left + QUARTER, top + QUARTER


def main(
    output: Annotated[Path, typer.Option("--output", help="Folder of the data set.")],
    train_size: Annotated[int, typer.Option("--train_size", min=1, help="Pictures to train on.")] = 2048,
    test_size: Annotated[int, typer.Option("--test_size", min=1, help="Held-out pictures.")] = 256,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same pictures.")] = 0,
) -> None:
    """Make the pictures and the questions."""
    (output / "images").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    drawn: dict[Picture, None] = {}
    while len(drawn) < train_size + test_size:
        drawn[Picture.drawn(rng)] = None
    pictures = list(drawn)
    for split, part in (("train", pictures[:train_size]), ("test", pictures[train_size:])):
        lines = []
        for number, picture in enumerate(part):
            qid = f"{split}_{number}_quarter_{picture.quarter}"
            picture.image().save(output / "images" / f"{qid}.png")
            line = {"qid": qid, "question": QUESTION, "answer": [str(picture.digit)], "image": [f"{qid}.png"]}
            lines.append(json.dumps(line | {"is_video": False}))
        (output / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
