"""The outputs in the docs are the command's own."""

from __future__ import annotations

from pathlib import Path

from doctor_page import PAGE, page_with_outputs


def test_the_page_shows_what_the_command_says(tmp_path: Path) -> None:
    page = page_with_outputs(tmp_path)
    assert page.count("Findings\n") == 4  # three, and that of an agent
    assert page == PAGE.read_text(encoding="utf-8"), "run python tests/helpers/doctor_page.py"
