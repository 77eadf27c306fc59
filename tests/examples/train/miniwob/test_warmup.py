"""What the warm-up of the recipe `miniwob` learns from the pages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from script_module import load_script

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[4] / "examples" / "train" / "miniwob" / "warmup.py"


@pytest.mark.parametrize(
    ("text", "word", "named", "others"),
    [
        ('Click button TWO.\n\n[1] button "ONE"\n[2] button "TWO"', "TWO", "click(2)", ["click(1)"]),
        (
            "Click on the red colored box.\n\n[1] clickable color red\n[2] clickable color blue",
            "red",
            "click(1)",
            ["click(2)"],
        ),
        ("Focus into the 2nd input textbox.\n\n[1] textbox\n[2] textbox\n", "2nd", "focus(2)", ["focus(1)"]),
    ],
)
def test_the_named_element_is_found(text: str, word: str, named: str, others: list[str]) -> None:
    page = load_script("miniwob_warmup", SCRIPT).read_page(text)
    assert (page.word, page.named, [*page.others]) == (word, named, others)


def test_another_color_stands_at_the_same_place() -> None:
    warmup = load_script("miniwob_warmup", SCRIPT)
    page = warmup.read_page("Click on the red colored box.\n\n[1] clickable color blue\n[2] clickable color red")
    drawn = {warmup.redraw_colors(page, ["pink", "lime"], random.Random(seed)) for seed in range(8)}
    assert {one.word for one in drawn} == {"pink", "lime"}
    assert {one.named for one in drawn} == {"click(2)"}
    assert not any(" red" in one.text for one in drawn)
    plain = warmup.read_page('Click button ONE.\n\n[1] button "ONE"\n[2] button "TWO"')
    assert warmup.redraw_colors(plain, ["pink"], random.Random(0)) == plain


def test_another_page_is_rejected() -> None:
    with pytest.raises(ValueError, match="no action is known"):
        load_script("miniwob_warmup", SCRIPT).read_page("Sort the list.")
