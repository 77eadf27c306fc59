from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from quarters import noise, quarters, same

from verl_tool.content.parts import encode_image
from verl_tool.servers.tools.base import CallError
from verl_tool.servers.tools.pictures.views import MAX_STEPS, Crop, ImageView

IMAGE = noise(200, 150)
PART = encode_image(IMAGE)
MANY = 1 << 20


def inner(size: tuple[int, int]) -> st.SearchStrategy[tuple[int, int, int, int]]:
    """A box within an image of that size."""
    across = st.tuples(st.integers(0, size[0] - 1), st.integers(1, size[0]))
    down = st.tuples(st.integers(0, size[1] - 1), st.integers(1, size[1]))
    return (
        st.tuples(across, down)
        .filter(lambda d: all(a < b for a, b in d))
        .map(lambda d: (d[0][0], d[1][0], d[0][1], d[1][1]))
    )


@settings(max_examples=50)
@given(st.data())
def test_a_crop_of_a_crop_is_a_crop_of_the_original(data: st.DataObject) -> None:
    view, left, top = ImageView.of(PART), 0, 0
    for _ in range(data.draw(st.integers(1, 4))):
        box = data.draw(inner(view.full))
        view, part = view.then(Crop(box), MANY)
        left, top = left + box[0], top + box[1]
        width, height = box[2] - box[0], box[3] - box[1]
        assert same(part.decode(), IMAGE.crop((left, top, left + width, top + height)))
    assert len(view.steps) == 1


def test_a_crop_of_what_was_scaled_down_has_all_pixels() -> None:
    whole, small = ImageView.of(PART).then(Crop((0, 0, 200, 150)), 1024)
    assert small.width * small.height <= 1024
    assert (whole.shown, whole.full) == ((small.width, small.height), (200, 150))
    _, crop = whole.then(Crop((10, 20, 40, 50)), 1024)
    assert same(crop.decode(), IMAGE.crop((10, 20, 40, 50)))


def test_steps_are_taken_in_their_order() -> None:
    view = ImageView.of(PART)
    for step in (Crop((0, 0, 100, 50)), ImageOps.mirror, Crop((0, 0, 30, 20))):
        view, part = view.then(step, MANY)
    assert same(part.decode(), ImageOps.mirror(IMAGE.crop((70, 0, 100, 20))))


def test_the_same_image_is_not_encoded_again() -> None:
    assert ImageView.of(PART).then(None, MANY)[1] is PART
    assert ImageView.of(PART).then(None, 1024)[1] is not PART


@pytest.mark.parametrize(("media_type", "shown"), [("image/jpeg", "image/jpeg"), ("image/webp", "image/png")])
def test_only_a_jpeg_is_shown_as_one(media_type: str, shown: str) -> None:
    _, part = ImageView.of(encode_image(quarters(), media_type)).then(Crop((8, 8, 32, 24)), MANY)
    assert part.media_type == shown
    red, green, blue = part.decode().resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
    assert red > 240
    assert max(green, blue) < 15


def test_steps_are_bounded() -> None:
    view = ImageView.of(PART)
    for _ in range(MAX_STEPS):
        view, _ = view.then(ImageOps.flip, MANY)
    with pytest.raises(CallError, match="was changed 16 times already; begin with an earlier one"):
        view.then(ImageOps.flip, MANY)


def test_what_the_original_says_of_itself_is_not_sent_with_each_crop() -> None:
    part = encode_image(quarters(), "image/jpeg", comment=b"who, when and where")
    assert b"who, when" in part.data
    assert b"who, when" not in ImageView.of(part).then(Crop((8, 8, 32, 24)), MANY)[1].data
