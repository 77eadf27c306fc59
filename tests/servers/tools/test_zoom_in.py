from __future__ import annotations

import pytest
from quarters import BLUE, GREEN, Looker, noise, quarters, same


@pytest.mark.parametrize("name", ["zoom_in", "crop_image", "crop_image_normalized", "image_zoom_in_tool"])
@pytest.mark.parametrize("box", [[40, 0, 80, 30], [0.5, 0, 1, 0.5], ["40", "0", "80", "30"], "[40, 0, 80, 30]"])
async def test_each_name_takes_pixels_and_fractions(name: str, box: object) -> None:
    text, [image] = await Looker("zoom_in", [quarters()]).call(name, bbox_2d=box, target_image=1)
    assert text == "Here is the cropped image. (Image 2, Image Size: 40x30)"
    assert image.getcolors() == [(1200, GREEN)]


async def test_images_are_counted_over_the_prompt_and_observations() -> None:
    looker = Looker("zoom_in", [noise(), quarters()])
    await looker.call("zoom_in", bbox_2d=[0, 30, 80, 60], target_image=2)
    assert same(await looker.image("zoom_in", bbox_2d=[0, 0, 40, 30], target_image=3), quarters().crop((0, 30, 40, 60)))
    text, _ = await looker.call("zoom_in", bbox_2d=[0, 0, 40, 30], target_image="4")
    assert "(Image 5, " in text
    assert same(await looker.image("zoom_in", bbox_2d=[8, 8, 40, 30]), noise().crop((8, 8, 40, 30)))


async def test_a_crop_is_taken_of_the_original_however_often_one_zooms() -> None:
    looker = Looker("zoom_in", [noise(400, 300)], max_pixels=1024)
    overview = await looker.image("zoom_in", bbox_2d=[0, 0, 1, 1])
    assert overview.width * overview.height <= 1024
    half = await looker.image("zoom_in", bbox_2d=[0, 0, overview.width / 2, overview.height / 2], target_image=2)
    assert half.width < 200
    last = await looker.image("zoom_in", bbox_2d=[0, 0, 0.1, 0.1], target_image=3)
    assert same(last, noise(400, 300).crop((0, 0, 20, 15)))


async def test_several_calls_of_one_action_are_counted_one_by_one() -> None:
    looker = Looker("zoom_in", [quarters()])
    call = '<tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": [0, 30, 40, 60], "target_image": %d}}</tool_call>'
    result = await looker.answer(call % 1 + call.replace("[0, 30, 40, 60]", "[8, 8, 24, 24]") % 2)
    assert "(Image 2, " in result.observation
    assert "(Image 3, " in result.observation
    assert [part.decode().getcolors() for part in result.image] == [[(1200, BLUE)], [(256, BLUE)]]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"bbox_2d": [40, 0, 20, 30]}, "corners are in the wrong order. The image is 80 x 60 pixels; write"),
        ({"bbox_2d": [100, 0, 120, 30]}, "the box [100, 0, 120, 30] lies outside of the image"),
        ({"bbox_2d": [4, 4, 4, 30]}, "is empty"),
        ({"bbox_2d": [4, 4, 6, 30]}, "has only 2 x 26 pixels of the original"),
        ({"bbox_2d": [4, 4, 60]}, "bbox_2d: List should have at least 4 items"),
        ({"bbox_2d": [4, 4, 60, "left"]}, "bbox_2d.3: Input should be a valid number"),
        ({"bbox_2d": [4, 4, 60, float("nan")]}, "Error: "),
        ({"bbox_2d": [4, 4, 60, 10**400]}, "Error: "),
        ({"bbox_2d": [4, 4, 1e300, 1e300]}, "(Image 2, Image Size: 76x56)"),
        ({"bbox_2d": "the cat"}, "Input should be a valid list"),
        ({}, "bbox_2d: Field required"),
        (
            {"bbox_2d": [4, 4, 60, 30], "target_image": 2},
            "there is no image 2; images are counted from 1, and there are 1",
        ),
        ({"bbox_2d": [4, 4, 60, 30], "target_image": 0}, "there is no image 0"),
        ({"bbox_2d": [4, 4, 60, 30], "target_image": "first"}, "target_image: Input should be a valid integer"),
        ({"bbox_2d": [4, 4, 60, 30], "zoom": 2}, "zoom: there is no such argument"),
    ],
)
async def test_what_is_wrong_is_told_to_the_model(arguments: dict[str, object], told: str) -> None:
    text, _ = await Looker("zoom_in", [quarters()]).call("zoom_in", **arguments)
    assert told in text


async def test_a_trajectory_without_images_is_told_so() -> None:
    text, images = await Looker("zoom_in").call("zoom_in", bbox_2d=[0, 0, 1, 1])
    assert text == "Error: there is no image yet: neither the prompt nor an observation has one"
    assert images == []


async def test_the_models_coordinates_are_an_option() -> None:
    looker = Looker("zoom_in", [quarters()], coordinates="thousandths")
    assert same(await looker.image("zoom_in", bbox_2d=[500, 0, 1000, 500]), quarters().crop((40, 0, 80, 30)))
