from __future__ import annotations

from pathlib import Path

import pytest

from verl_tool.errors import ConfigError
from verl_tool.formats import ALL_FORMATS, FENCED, HERMES, PYTHON_TAGS, format_by_name, loop_formats, rendered_markers
from verl_tool.formats.load import specs_of
from verl_tool.formats.native import NATIVE
from verl_tool.protocol import ToolDescription

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: fmt.name)
def test_every_built_in_format_is_known_by_its_name(fmt) -> None:
    assert format_by_name(fmt.name) is fmt


def test_a_users_file_gives_a_format_whose_stop_strings_no_output_holds() -> None:
    fmt = format_by_name(str(DATA / "prompt_format.py"))
    [call] = fmt.find_calls("hm\n>> calc 1+1\n")
    assert (call.name, call.input) == ("calc", "1+1")
    assert PYTHON_TAGS.render("a >>>> b <<<< c calc>> d") == "\n<result>\na > >>> b < <<< c c alc>> d\n</result>\n"
    # What stands between the marks of its observations is no call of another format.
    found_by_another = PYTHON_TAGS.find_calls("<<<< <python>a</python> >>>> <python>b</python>")
    assert [call.input for call in found_by_another] == ["b"]
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
        ("FORMAT = 3\n", "not a format: it lacks name, stop, observation, markers, find_calls, render, usage"),
        ("from verl_tool.formats import TrlFormat as FORMAT\nFORMAT = FORMAT()\nFORMAT.stop = ('a',)\n", "cannot mark"),
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


def test_a_tag_is_a_format_by_its_own_spelling() -> None:
    fmt = format_by_name("<reverse>")
    [call] = fmt.find_calls("so <reverse>abc</reverse>")
    assert (call.name, call.input) == ("reverse", "abc")
    assert "</reverse>" not in PYTHON_TAGS.render("</reverse>")
    assert format_by_name("<reverse>") is fmt
    assert specs_of(fmt) == ("<reverse>",)


def test_tags_of_one_s_own_are_a_list_of_five() -> None:
    spec = '["run", "<<RUN>>", "<<END>>", "<<OUT>>", "<<DONE>>"]'
    fmt = format_by_name(spec)
    [call] = fmt.find_calls("<<RUN>>1<<END>>")
    assert (call.name, fmt.render("2", call)) == ("run", "\n<<OUT>>\n2\n<<DONE>>\n")
    assert specs_of(fmt) == (spec,)


@pytest.mark.parametrize("spec", ["<a b>", "<>", "[1]", '["a"]', "[", '["a", "<", ">", "b", "c"]'])
def test_what_is_no_tag_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a tag|cannot mark"):
        format_by_name(spec)


def described(*formats: str) -> ToolDescription:
    return ToolDescription(name="t", description="", parameters={}, usage="", example_actions=[], formats=list(formats))


def test_a_loop_has_the_formats_that_are_named_or_else_all_and_the_tools_own_tags() -> None:
    assert loop_formats(["hermes", "<reverse>", "hermes"]) == (HERMES, format_by_name("<reverse>"))
    assert loop_formats(None) == ALL_FORMATS
    told = [described("hermes", "<reverse>", "nowhere.py"), described("<reverse>")]
    assert loop_formats(None, told) == (*ALL_FORMATS, format_by_name("<reverse>"))
    assert loop_formats(["hermes"], told) == (HERMES,)
    with pytest.raises(ConfigError, match="formats is empty"):
        loop_formats([])


def test_an_observation_holds_no_control_token_of_a_model() -> None:
    fmt = format_by_name(str(DATA / "prompt_format.py"))
    marks = rendered_markers([fmt, *ALL_FORMATS])
    assert {"<tool_response>", "</tool_call>", "<response>", ">>>>", "<<<<"} <= marks
    assert not any(mark.startswith(("<|", "<｜", "[")) for mark in marks)
    assert any(mark.startswith("<|") for each in NATIVE for mark in each.markers())
