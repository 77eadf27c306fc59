"""What the warm-up of the recipe `miniwob` learns from the pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_module import load_script

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[4] / "examples" / "train" / "miniwob" / "warmup.py"


@pytest.mark.parametrize(
    ("text", "named", "others"),
    [
        ('Click button TWO.\n\n[1] button "ONE"\n[2] button "TWO"', "click(2)", ["click(1)"]),
        (
            "Click on the red colored box.\n\n[1] clickable color red\n[2] clickable color blue",
            "click(1)",
            ["click(2)"],
        ),
        ("Focus into the 2nd input textbox.\n\n[1] textbox\n[2] textbox\n", "focus(2)", ["focus(1)"]),
    ],
)
def test_the_named_element_is_found(text: str, named: str, others: list[str]) -> None:
    page = load_script("miniwob_warmup", SCRIPT).read_page(text)
    assert (page.named, [*page.others]) == (named, others)


def test_another_page_is_rejected() -> None:
    with pytest.raises(ValueError, match="no action is known"):
        load_script("miniwob_warmup", SCRIPT).read_page("Sort the list.")
