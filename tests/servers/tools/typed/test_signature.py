from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from verl_tool.errors import ConfigError
from verl_tool.servers.tools import Context, ToolOptions
from verl_tool.servers.tools.typed.signature import read_signature


class Point(BaseModel):
    """A place."""

    x: float
    title: str = "here"


class Colour(Enum):
    red = "r"


async def google(city: str, days: int = 3) -> str:
    """Forecast for
    a city.

    It is made
    every hour.

    - sun
    - rain

    Args:
        city: Name of
            the city.
        days (int): Days ahead.

    Returns:
        The forecast.
    """


async def numpy(city: str, days: int = 3) -> str:
    """Forecast for a city.

    Parameters
    ----------
    city : str
        Name of the city.
    days : int
        Days ahead.
    """


async def rest(city: str, days: int = 3) -> str:
    """Forecast for a city.

    :param city: Name of the city.
    :param days: Days ahead.
    """


class Plus(BaseModel):
    kind: Literal["plus"]
    left: Annotated[Plus | Times | Leaf, Field(discriminator="kind")]


class Times(BaseModel):
    kind: Literal["times"]
    left: Annotated[Plus | Times | Leaf, Field(discriminator="kind")]
    more: list[Times] | Times | str | None = None


class Leaf(BaseModel):
    kind: Literal["leaf"]


async def expression(tree: Plus) -> str:
    """Does it."""


def test_a_type_that_holds_itself_may_be_a_union_with_a_discriminator() -> None:
    signature = read_signature(expression, "expression")
    tree: dict[str, Any] = {"kind": "leaf"}
    for _ in range(25):
        tree = {"kind": "times", "left": tree}
    assert signature.checked({"tree": {"kind": "plus", "left": tree}})


async def many(
    unit: Literal["km", "mi"],
    where: Point | list[Point],
    colour: Colour | None = None,
    size: Annotated[int, Field(ge=1, le=9, description="How big.")] = 1,
    schema: dict[str, int] | None = None,
    _hidden: bool = False,
) -> str:
    """Does it."""


@pytest.mark.parametrize("function", [google, numpy, rest])
def test_a_schema_comes_from_signature_and_docstring(function: Callable[..., object]) -> None:
    signature = read_signature(function, "weather")
    assert signature.schema() == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name of the city."},
            "days": {"type": "integer", "description": "Days ahead.", "default": 3},
        },
        "required": ["city"],
    }
    assert next(iter(signature.schema()["properties"]["city"])) == "type"
    assert signature.display == "weather(city, days=3)"


def test_a_description_is_unwrapped_but_its_lists_are_not() -> None:
    assert read_signature(google, "w").description == (
        "Forecast for a city.\n\nIt is made every hour.\n\n- sun\n- rain"
    )


def test_types_of_every_kind_are_in_the_schema() -> None:
    schema = read_signature(many, "many").schema()
    properties = schema["properties"]
    assert properties["unit"] == {"enum": ["km", "mi"], "type": "string"}
    assert properties["where"]["anyOf"][0] == {"$ref": "#/$defs/Point"}
    assert properties["size"] == {
        "default": 1, "description": "How big.", "maximum": 9, "minimum": 1, "type": "integer"
    }  # fmt: skip
    assert set(properties) == {"unit", "where", "colour", "size", "schema", "_hidden"}
    assert schema["required"] == ["unit", "where"]
    point = schema["$defs"]["Point"]
    assert set(point["properties"]) == {"x", "title"}, "an argument called title is not a title"
    assert "title" not in {*schema, *point}


def test_context_and_options_are_no_arguments_of_the_model() -> None:
    async def tool(text: str, context: Context, options: ToolOptions, maybe: Context | None = None) -> str:
        """Does it.

        Args:
            text: A text.
            context: Who calls.
        """

    signature = read_signature(tool, "tool")
    assert [argument.name for argument in signature.arguments] == ["text"]
    assert (signature.context, signature.options) == ("maybe", "options")


def untyped(city):
    """Does it."""


def star(*cities: str) -> str:
    """Does it."""


def stars(**cities: str) -> str:
    """Does it."""


def positional(city: str, /) -> str:
    """Does it."""


def undocumented(city: str) -> str:
    return city


def misspelt(city: str) -> str:
    """Does it.

    Args:
        cty: Name of the city.
    """


def unknown_type(city: Cityy) -> str:  # noqa: F821
    """Does it."""


def no_json(call: Callable[[], int]) -> str:
    """Does it."""


class Add(BaseModel):
    left: Add | Multiply | int


class Multiply(BaseModel):
    left: Add | Multiply | int
    factors: list[Add] | list[Multiply] = []


def ambiguous(expression: Add) -> str:
    """Does it."""


def field_default(days: int = Field(3, ge=1)) -> str:
    """Does it."""


async def yielding(city: str) -> Any:
    """Does it."""
    yield city


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (untyped, "argument 'city' of tool t has no type; annotate it, such as city: str, or city: Context"),
        (star, r"takes \*cities: .*gives each argument by its name; list the arguments one by one"),
        (stars, r"takes \*\*cities"),
        (positional, "takes city"),
        (undocumented, "has no docstring; its first lines tell the model what the tool does"),
        (misspelt, "describes 'cty'; its arguments are: city"),
        (unknown_type, "cannot be read: name 'Cityy' is not defined"),
        (no_json, "has a type that no JSON can give"),
        (ambiguous, "has the type Add, which holds a union of several types like it.*discriminator"),
        (field_default, r"write days: Annotated\[TYPE, Field\(…\)\]"),
        (yielding, "yields, and a tool returns its whole answer at once"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_in_words_for_its_author(function: Callable[..., object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_signature(function, "t")


def test_the_one_argument_that_a_text_is() -> None:
    async def none() -> str:
        """Does it."""

    async def optional(a: int = 1, b: str = "") -> str:
        """Does it."""

    async def several(a: str, b: str) -> str:
        """Does it."""

    texts = [read_signature(function, "t").free_text for function in (google, none, optional, several)]
    assert [argument and argument.name for argument in texts] == ["city", None, "a", None]
