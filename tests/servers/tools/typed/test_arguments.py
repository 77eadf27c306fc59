"""Whatever a model writes into a call is arguments for the function, or words that say what is wrong."""

from __future__ import annotations

import json
from datetime import date
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from verl_tool.formats import ALL_FORMATS, HERMES, Call
from verl_tool.formats.find import find_calls
from verl_tool.servers.tools import InvalidCall
from verl_tool.servers.tools.typed.arguments import MAX_DEPTH, MAX_VALUES, read_arguments
from verl_tool.servers.tools.typed.signature import Signature, read_signature


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: float


class Square(BaseModel):
    kind: Literal["square"]
    side: float


async def weather(city: str, days: int = 3, unit: Literal["C", "F"] = "C") -> str:
    """Does it."""


async def search(query: str) -> str:
    """Does it."""


async def show(lines: list[int] | None = None, whole: bool = False) -> str:
    """Does it."""


async def area(shape: Circle | Square) -> str:
    """Does it."""


async def tree(root: Node) -> str:
    """Does it."""


async def when(day: date | int) -> str:
    """Does it."""


async def write(path: str, content: str) -> str:
    """Does it."""


async def now() -> str:
    """Does it."""


async def odd(schema: Any, _x: float = 0.0, copy: Annotated[dict[str, int] | None, Field(max_length=2)] = None) -> str:
    """Does it."""


SIGNATURES = {
    f.__name__: read_signature(f, f.__name__) for f in (weather, search, show, area, tree, when, write, now, odd)
}


def of_json(name: str, arguments: Any) -> dict[str, Any]:
    [call] = HERMES.find_calls(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")
    return read_arguments(SIGNATURES[name], call)


def of_text(name: str, text: str) -> dict[str, Any]:
    return read_arguments(SIGNATURES[name], Call(name, text, 0, len(text), HERMES))


@pytest.mark.parametrize(
    ("name", "arguments", "read"),
    [
        ("weather", {"city": "Rome"}, {"city": "Rome"}),
        ("weather", {"city": 5, "days": "2"}, {"city": "5", "days": 2}),
        ("weather", {"city": "Rome", "days": 2.0, "unit": "F"}, {"city": "Rome", "days": 2, "unit": "F"}),
        ("search", {"input": "sun"}, {"query": "sun"}),
        ("show", {}, {}),
        ("show", {"lines": None}, {"lines": None}),
        ("show", {"lines": "[1, 2]", "whole": "true"}, {"lines": [1, 2], "whole": True}),
        ("area", {"shape": {"kind": "square", "side": 2}}, {"shape": Square(kind="square", side=2)}),
        ("area", {"shape": '{"kind": "circle", "radius": 1}'}, {"shape": Circle(kind="circle", radius=1)}),
        ("when", {"day": "2026-05-01"}, {"day": date(2026, 5, 1)}),
        ("when", {"day": 7}, {"day": 7}),
        ("odd", {"schema": [1], "_x": 2, "copy": {"a": 1}}, {"schema": [1], "_x": 2.0, "copy": {"a": 1}}),
    ],
)
def test_arguments_by_name_are_brought_to_their_types(name: str, arguments: Any, read: dict[str, Any]) -> None:
    assert of_json(name, arguments) == read


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("weather", "Rome", {"city": "Rome"}),
        ("weather", " Rome \n", {"city": "Rome"}),
        ("weather", '{"city": "Rome", "days": 1}', {"city": "Rome", "days": 1}),
        ("search", "\n  a\n  b\n", {"query": "  a\n  b"}),
        ("search", '{"query": "sun"}', {"query": "sun"}),
        ("search", '{"sun": 1}', {"query": '{"sun": 1}'}),
        ("search", "3", {"query": "3"}),
        ("search", "", {"query": ""}),
        ("show", "[1, 2]", {"lines": [1, 2]}),
        ("show", "", {}),
        ("area", '{"kind": "square", "side": 2}', {"shape": Square(kind="square", side=2)}),
        ("area", '{"shape": {"kind": "square", "side": 2}}', {"shape": Square(kind="square", side=2)}),
        ("when", "2026-05-01", {"day": date(2026, 5, 1)}),
        ("when", "7", {"day": 7}),
        ("write", '{"path": "a", "content": "b"}', {"path": "a", "content": "b"}),
        ("now", "", {}),
        ("now", "{}", {}),
    ],
)
def test_a_text_is_the_one_argument_or_arguments_by_name(name: str, text: str, read: dict[str, Any]) -> None:
    assert of_text(name, text) == read


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        (
            "weather",
            {"town": "Rome", "days": "three"},
            "wrong arguments for weather(city, days=3, unit='C'): city: Field required; days: Input should be a valid "
            "integer, unable to parse string as an integer, not 'three'; town: there is no such argument",
        ),
        ("weather", {"city": "Rome", "unit": "K"}, "unit: Input should be 'C' or 'F', not 'K'"),
        ("weather", {"city": True}, "city: Input should be a valid string, not True"),
        ("weather", {"city": ["Rome"]}, "city: Input should be a valid string"),
        ("show", {"lines": [1, "x"]}, "lines.1: Input should be a valid integer"),
        ("show", {"lines": '[1, "x"]'}, "lines.1: Input should be a valid integer"),
        ("tree", {"root": {"value": 1, "children": [{"value": "x"}]}}, "root.children.0.value: Input should be"),
        ("odd", {"schema": 1, "_x": float("inf")}, "_x: Input should be a finite number"),
        ("odd", {"schema": 1, "copy": {"a": 1, "b": 2, "c": 3}}, "copy: Dictionary should have at most 2 items"),
        ("weather", "Rome, 3 days", None),
    ],
)
def test_what_is_wrong_is_told_exactly(name: str, arguments: Any, words: str | None) -> None:
    if words is None:
        assert of_json(name, arguments) == {"city": arguments}
        return
    with pytest.raises(InvalidCall) as caught:
        of_json(name, arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "write",
            "hello",
            "arguments of write(path, content) as one JSON object with the names path, content",
        ),
        ("weather", '{"town": "Rome"}', "town: there is no such argument"),
        ("now", "please", "now() takes no arguments, and was given 'please'"),
        ("now", '{"a": 1}', "a: there is no such argument"),
        ("show", "[1, x", "lines: Input should be a valid list"),
        ("when", "soon", "day.date"),
    ],
)
def test_a_text_that_does_not_fit_is_told(name: str, text: str, words: str) -> None:
    with pytest.raises(InvalidCall) as caught:
        of_text(name, text)
    assert words in str(caught.value)


def nested(depth: int) -> Any:
    value: Any = {"value": 1}
    for _ in range(depth):
        value = {"value": 1, "children": [value]}
    return value


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("odd", {"schema": [[0] * MAX_VALUES]}, f"hold more than {MAX_VALUES} values"),
        ("odd", {"schema": nested(MAX_DEPTH)}, f"nested deeper than {MAX_DEPTH} levels"),
        ("tree", {"root": nested(400)}, "nested deeper"),
        ("tree", {"root": json.dumps(nested(300))}, "nested deeper"),
        ("show", {"lines": ["x"] * 3000}, "and 2995 more"),
        ("show", {f"<|im_end|>{i}\n": i for i in range(3000)}, "and 2995 more"),
        ("show", {"a" * 100_000: 1}, "there is no such argument"),
        ("show", {"x" * 9 + "\ud800": 1}, "wrong arguments for show"),
        ("show", {"\x00\u202e": 2}, "'\\x00\\u202e': there is no such argument"),
        ("weather", {"city": "Rome", "days": "9" * 100_000}, "days: Unable to parse"),
        ("weather", {"city": "Rome", "days": 10**4000}, None),
        ("weather", {"city": "Rome", "unit": 10**4000}, "unit: Input should be 'C' or 'F', not a number of very"),
        ("weather", {"city": "Rome", "days": float("nan")}, "days: Input should be a finite number"),
    ],
)
def test_hostile_arguments_are_answered_in_a_bounded_text(name: str, arguments: Any, words: str | None) -> None:
    if words is None:
        assert of_json(name, arguments)
        return
    with pytest.raises(InvalidCall) as caught:
        of_json(name, arguments)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert str(caught.value).replace("\ud800", "").isprintable()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.text(st.characters(categories=["Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from(
    ["city", "days", "unit", "query", "lines", "whole", "shape", "root", "day", "path", "schema", "_x", "copy", "input"]
)


def read_or_refused(signature: Signature, call: Call) -> None:
    """No exception but `InvalidCall`, which is short; what is read are arguments of the function."""
    words = "read"
    try:
        read = read_arguments(signature, call)
    except InvalidCall as refused:
        words = str(refused)
    else:
        assert set(read) <= {argument.name for argument in signature.arguments}
        assert {argument.name for argument in signature.arguments if argument.required} <= set(read)
    assert 0 < len(words) < 2000


@given(st.sampled_from(sorted(SIGNATURES)), st.dictionaries(names | st.text(max_size=8), json_values, max_size=5))
@settings(max_examples=150)
def test_any_arguments_are_read_or_refused(name: str, arguments: dict[str, Any]) -> None:
    read_or_refused(SIGNATURES[name], Call(name, json.dumps(arguments), 0, 1, HERMES, arguments))


@given(st.sampled_from(sorted(SIGNATURES)), st.text(max_size=60) | json_values.map(json.dumps))
@settings(max_examples=150)
def test_any_text_is_read_or_refused(name: str, text: str) -> None:
    read_or_refused(SIGNATURES[name], Call(name, text, 0, 1, HERMES))
    for call in find_calls(f"<{name}>{text}</{name}>\n```{name}\n{text}\n```", ALL_FORMATS, {name}):
        read_or_refused(SIGNATURES[name], call)


@given(st.text(st.characters(exclude_categories=["Cs"])).map(lambda text: text.strip()), st.integers(-(10**9), 10**9))
@settings(max_examples=50)
def test_right_arguments_come_through_as_they_are(city: str, days: int) -> None:
    assert of_json("weather", {"city": city, "days": days}) == {"city": city, "days": days}
