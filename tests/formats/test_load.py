from __future__ import annotations

from pathlib import Path

import pytest

from verl_tool.errors import ConfigError
from verl_tool.formats import ALL_FORMATS, FENCED, PYTHON_TAGS, format_by_name

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: fmt.name)
def test_every_built_in_format_is_known_by_its_name(fmt) -> None:
    assert format_by_name(fmt.name) is fmt


def test_a_users_file_gives_a_format_whose_stop_strings_no_output_holds() -> None:
    fmt = format_by_name(str(DATA / "prompt_format.py"))
    [call] = fmt.find_calls("hm\n>> calc 1+1\n")
    assert (call.name, call.input) == ("calc", "1+1")
    assert ">>>>" not in PYTHON_TAGS.render("a >>>> b")
    assert format_by_name(str(DATA / "prompt_format.py")) is fmt


def test_an_entry_point_gives_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "fancy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fancy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[verl_tool.formats]\nfancy = verl_tool.formats:FENCED\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert format_by_name("fancy") is FENCED


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"format 'hermess' is unknown; known: deepseek, .*hermes, json, .*trl"):
        format_by_name("hermess")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x = 1\n", "not a format"),
        ("FORMAT = 3\n", "not a format"),
        ("import nothing_of_that_name\n", "cannot be imported: ModuleNotFoundError"),
        ("1 +\n", "cannot be imported: SyntaxError"),
    ],
)
def test_a_file_without_a_format_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        format_by_name(str(path))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*/nowhere\.py"):
        format_by_name("nowhere.py")
