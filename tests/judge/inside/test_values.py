"""Values on their way between the judge and the solution."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from script_module import load_script

import verl_tool.judge as package


def _loaded() -> ModuleType:
    """The module as the judge has it: it is no part of the package's own imports."""
    path = Path(package.__file__).parent / "inside" / "values.py"
    return load_script("judge_values", path)


values = _loaded()
Point = namedtuple("Point", "x y")

HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters()),
    st.binary(max_size=20),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.dates(),
    st.datetimes(),
    st.times(),
    st.timedeltas(),
    st.complex_numbers(allow_nan=False),
)
ANY = st.recursive(
    HASHABLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.sets(HASHABLE, max_size=4),
        st.frozensets(HASHABLE, max_size=4),
        st.lists(inner, max_size=4).map(deque),
        st.dictionaries(HASHABLE, inner, max_size=4).map(OrderedDict),
        st.builds(bytearray, st.binary(max_size=9)),
    ),
    max_leaves=12,
)


def refuse(value: Any) -> Any:
    raise TypeError(f"{value!r} is no plain value")


def travelled(value: Any) -> Any:
    return values.ValueReader(refuse).read(json.loads(json.dumps(values.encode(value, refuse))))


@given(ANY)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    arrived = travelled(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_rarer_values() -> None:
    assert travelled(Counter("aab")).most_common(1) == [("a", 2)]
    assert travelled(range(1, 9, 2)) == range(1, 9, 2)
    assert travelled(Point(1, [2])).y == [2]
    assert travelled(Point(1, 2)) == (1, 2)
    assert repr(travelled(Point(1, 2))) == "Point(x=1, y=2)"
    assert travelled(travelled(Point(1, 2)))._asdict() == {"x": 1, "y": 2}
    with pytest.raises(AttributeError):
        travelled(Point(1, 2)).z  # noqa: B018
    assert travelled(deque([1, 2], maxlen=2)).maxlen == 2
    assert travelled(datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc)).tzinfo is not None
    assert travelled([Decimal("NaN")])[0].is_nan()
    assert travelled(Fraction(1, 3)) == Fraction(1, 3)


def test_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(6, dtype="int16").reshape(2, 3)
    arrived = travelled({"a": array, "b": numpy.float32(0.5), "c": numpy.array(1j)})
    assert arrived["a"].dtype == array.dtype
    assert (arrived["a"] == array).all()
    assert type(arrived["b"]) is numpy.float32
    assert arrived["c"].shape == ()


class Always(int):
    """An int with an opinion."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def test_only_the_plain_part_of_a_subclass_travels() -> None:
    arrived = travelled([Always(3), True])
    assert type(arrived[0]) is int
    assert arrived[0] != 4


def test_what_is_no_plain_value_is_referred_to() -> None:
    class Own(list):
        pass

    own = Own([1])
    assert values.encode([own], lambda value: ["solution", 7]) == ["list", [["solution", 7]]]
    assert values.ValueReader(lambda data: data[1]).read(["list", [["solution", 7]]]) == [7]


@given(st.recursive(st.one_of(st.none(), st.integers(), st.text(max_size=12)), lambda i: st.lists(i, max_size=4)))
def test_hostile_data_makes_nothing_but_a_value_or_an_error(data: Any) -> None:
    with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError):
        values.ValueReader(refuse).read(data)


@pytest.mark.parametrize(
    "data",
    [
        ["Decimal", "1e999999999"],
        ["Decimal", "9" * 20_000],
        ["Fraction", "1e999999999"],
        ["Fraction", 1, 0],
        ["range", 0, 10**12, 1],
        ["int", "0x" + "f" * (1 << 20)],
        ["complex", "1", 2],
        ["numpy", "|O", [1], [1], True],
        ["numpy", "<U9999999", [9], [""] * 9, True],
        ["numpy", "i4,(2)f8", [1], [1], True],
        ["numpy", "<f8", [-1], [1.0], True],
        ["numpy", "<f8", [2], [1.0], True],
        ["Record", "P", ["x"], [1, 2]],
        ["list", {"a": 1}],
        ["deque", [], "3"],
        {"a": 1},
        [["list"], []],
        [],
    ],
)
def test_no_form_but_those_agreed_on_is_read(data: Any) -> None:
    with pytest.raises((ValueError, TypeError, ArithmeticError)):
        values.ValueReader(refuse).read(data)
