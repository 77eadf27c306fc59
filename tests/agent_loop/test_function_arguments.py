"""A call's text or JSON as the arguments of a function."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import pytest

from verl_tool.agent_loop.function_arguments import ArgumentsError, CheckedFunction
from verl_tool.errors import ConfigError
from verl_tool.formats import HERMES, Call


def convert(value: float, unit: Literal["km", "mi"], digits: int = 1) -> str:
    """Converts a length.

    To the other unit.
    """
    return f"{value * 1.609 if unit == 'mi' else value / 1.609:.{digits}f}"


def search(query: str, limit: int = 3) -> str:
    return f"{query}|{limit}"


def echo(query):  # type: ignore[no-untyped-def]
    return query


def nothing() -> str:
    return "nothing"


def keywords(*, a: int, b: str) -> str:
    return f"{a}|{b}"


def everything(*texts: str, **more: str) -> str:
    return "|".join([*texts, *more.values()])


class Doubler:
    """Doubles."""

    def __call__(self, value: int) -> int:
        return 2 * value


def run(function: Any, text: str = "", arguments: dict[str, Any] | None = None) -> object:
    return CheckedFunction("tool", function).run(Call("tool", text, 0, 0, HERMES, arguments))


@pytest.mark.parametrize(
    ("function", "text", "answer"),
    [
        (echo, ' {"a": 1}, 2', ' {"a": 1}, 2'),
        (search, "Berlin, 5", "Berlin, 5|3"),
        (search, '{"query": "Berlin", "limit": "5"}', "Berlin|5"),
        (search, '{"other": 1}', '{"other": 1}|3'),
        (convert, "10, km", "6.2"),
        (convert, '10, "mi", 3', "16.090"),
        (convert, '["10", "mi"]', "16.1"),
        (convert, '{"value": 10, "unit": "mi", "digits": 0}', "16"),
        (partial(convert, 10), "mi", "16.1"),
        (keywords, "7, x", "7|x"),
        (nothing, " ", "nothing"),
        (everything, "a, b", "a, b"),
        (Doubler(), "21", 42),
        (math.sqrt, "4", TypeError),
        (str, "4", "4"),
    ],
)
def test_a_text_becomes_the_arguments(function: Any, text: str, answer: object) -> None:
    if isinstance(answer, type):
        with pytest.raises(answer):
            run(function, text)
    else:
        assert run(function, text) == answer


@pytest.mark.parametrize(
    ("function", "arguments", "answer"),
    [
        (convert, {"value": "10", "unit": "mi"}, "16.1"),
        (search, {"query": 5}, "5|3"),
        (everything, {"a": "x", "b": "y"}, "x|y"),
        (math.pow, {"x": 2, "y": 3}, 8.0),
        (nothing, {}, "nothing"),
    ],
)
def test_json_gives_arguments_by_name_in_the_types_of_the_annotations(
    function: Any, arguments: dict[str, Any], answer: object
) -> None:
    assert run(function, arguments=arguments) == answer


@pytest.mark.parametrize(
    ("function", "text", "arguments", "words"),
    [
        (convert, "10", None, r"tool\(value, unit, digits=1\) was given 1 arguments; separate them by commas"),
        (convert, "1, 2, 3, 4", None, "was given 4 arguments"),
        (convert, "ten, km", None, r"Wrong arguments for tool\(.*\): value: .* valid number"),
        (convert, "", {"value": 1, "unit": "m"}, "unit: Input should be 'km' or 'mi'"),
        (convert, "", {"value": 1}, "unit: Missing required argument"),
        (search, "", {"query": "a", "count": 1}, "count: Unexpected keyword argument"),
        (nothing, "please", None, r"tool\(\) takes no arguments, and was given 'please'"),
    ],
)
def test_what_does_not_fit_is_told_to_the_model(
    function: Any, text: str, arguments: dict[str, Any] | None, words: str
) -> None:
    with pytest.raises(ArgumentsError, match=words):
        run(function, text, arguments)


def test_what_the_function_raises_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda query: 1 / 0, "x")
    with pytest.raises(TypeError, match="its own"):
        run(_raising, "x")


def _raising(query: str) -> None:
    raise TypeError("its own")


def test_a_prompt_tells_names_types_and_the_first_paragraph() -> None:
    told = CheckedFunction("convert", convert).describe()
    assert told.description == "Converts a length."
    assert told.parameters["required"] == ["value", "unit"]
    assert told.parameters["properties"]["unit"]["enum"] == ["km", "mi"]
    assert CheckedFunction("pow", math.pow).describe().parameters["required"] == ["x", "y"]
    assert CheckedFunction("echo", echo).describe().parameters["properties"].keys() == {"query"}
    assert CheckedFunction("all", everything).describe().parameters["type"] == "object"


def test_types_that_cannot_be_read_are_refused() -> None:
    def mine(value: NoSuchType) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    with pytest.raises(ConfigError, match=r"types of the tool 'mine' cannot be read: .*NoSuchType"):
        CheckedFunction("mine", mine)
