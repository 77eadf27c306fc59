from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.servers.tools.base import CallError
from verl_tool.servers.tools.pictures.boxes import box_in_pixels, in_pixels

SIDES = st.integers(1, 3000)


@given(st.data(), SIDES, SIDES)
def test_whole_pixels_stay_as_they_are_and_fractions_of_them_are_the_same(
    data: st.DataObject, width: int, height: int
) -> None:
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    right, bottom = data.draw(st.integers(left + 1, width)), data.draw(st.integers(top + 1, height))
    size, box = (width, height), (left, top, right, bottom)
    if max(right - left, bottom - top) > 100 * min(right - left, bottom - top):
        with pytest.raises(CallError, match="is too thin"):
            box_in_pixels(box, size, size)
        return
    assert box_in_pixels(box, size, size, "pixels") == box
    fractions = [value / size[n % 2] for n, value in enumerate(box)]
    assert box_in_pixels(fractions, size, size) == box
    assert box_in_pixels([1000 * each for each in fractions], size, size, "thousandths") == box
    if max(box) > 1:
        assert box_in_pixels(box, size, size) == box


@given(st.lists(st.floats(), min_size=4, max_size=4), st.tuples(SIDES, SIDES), st.tuples(SIDES, SIDES))
def test_any_numbers_are_a_box_within_the_image_or_an_error_for_the_model(
    values: list[float], shown: tuple[int, int], full: tuple[int, int]
) -> None:
    try:
        left, top, right, bottom = box_in_pixels(values, shown, full, least=3)
    except CallError:
        return
    assert 0 <= left < right <= full[0]
    assert 0 <= top < bottom <= full[1]
    assert right - left >= min(3, full[0])
    assert bottom - top >= min(3, full[1])


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([30, 10, 20, 40], "is empty, or its corners are in the wrong order"),
        ([10, 10, 10, 40], "is empty"),
        ([100, 10, 120, 40], "lies outside of the image"),
        ([-9, -9, 0, 0], "lies outside of the image"),
        ([10, 10, 12, 40], "has only 4 x 60 pixels of the original"),
        ([math.nan, 10, 12, 40], "holds a value that is no number"),
        ([10, 10, math.inf, 40], "holds a value that is no number"),
    ],
)
def test_an_error_tells_the_limits(values: list[float], problem: str) -> None:
    with pytest.raises(CallError) as raised:
        box_in_pixels(values, (80, 60), (160, 120), "pixels", least=8)
    assert problem in str(raised.value)
    limits = "in pixels with 0 <= x1 < x2 <= 80 and 0 <= y1 < y2 <= 60, and at least 8 pixels of the original a side"
    assert limits in str(raised.value)


def test_an_error_tells_the_unit() -> None:
    with pytest.raises(CallError, match="in thousandths of its sides with 0 <= x1 < x2 <= 1000"):
        box_in_pixels([5, 5, 1, 1], (80, 60), (80, 60), "thousandths")
    with pytest.raises(CallError, match="or all four as fractions from 0 to 1, and"):
        box_in_pixels([5, 5, 1, 1], (80, 60), (80, 60))


def test_a_box_that_reaches_beyond_the_image_is_cut() -> None:
    assert box_in_pixels([-5, 20, 100, 61], (80, 60), (80, 60)) == (0, 20, 80, 60)


def test_what_is_seen_smaller_is_measured_in_the_pixels_of_the_original() -> None:
    assert box_in_pixels([10, 10, 20, 20], (80, 60), (800, 300)) == (100, 50, 200, 100)
    assert in_pixels([40, 30, 80, 60], (80, 60), (800, 600), "auto") == [400, 300, 800, 600]
