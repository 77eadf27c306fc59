from __future__ import annotations

import pytest
from quarters import RED, Looker, quarters, same

from verl_tool.servers.tools.draw import MAX_SHAPES

YELLOW = (255, 255, 0)


async def test_boxes_points_and_lines_are_drawn_on_a_copy() -> None:
    looker = Looker("draw,zoom_in", [quarters()])
    text, [image] = await looker.call(
        "draw", boxes=[[4, 4, 20, 20]], points=[[60, 15]], lines=[[0, 45, 80, 45]], color="yellow"
    )
    assert text == "Here is the image with what you drew. (Image 2, Image Size: 80x60)"
    assert [image.getpixel(at) for at in ((4, 10), (20, 10), (60, 15), (50, 45))] == [YELLOW] * 4
    assert image.getpixel((12, 12)) == RED
    assert same(await looker.image("zoom_in", bbox_2d=[0, 0, 80, 60]), quarters())
    assert same(await looker.image("zoom_in", bbox_2d=[0, 0, 40, 30], target_image=2), image.crop((0, 0, 40, 30)))


async def test_fractions_are_of_the_sides() -> None:
    image = await Looker("draw", [quarters()]).image("draw", points=[[0.5, 0.5]], color="#ffff00")
    assert image.getpixel((40, 30)) == YELLOW
    assert image.getpixel((20, 15)) == RED


async def test_a_label_stands_beside_each_shape() -> None:
    bare = await Looker("draw", [quarters(400, 300)]).image("draw", points=[[100, 50], [100, 100]], color="yellow")
    named = await Looker("draw", [quarters(400, 300)]).image(
        "draw", points=[[100, 50], [100, 100]], label="Größe 日", color="yellow"
    )
    assert not same(bare, named)


async def test_corners_in_any_order_are_a_box_to_draw() -> None:
    one = await Looker("draw", [quarters()]).image("draw", boxes=[[20, 20, 4, 4]], color="yellow")
    assert same(one, await Looker("draw", [quarters()]).image("draw", boxes=[[4, 4, 20, 20]], color="yellow"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "there is nothing to draw; give boxes, points or lines"),
        ({"points": [[100, 10]]}, "a shape reaches beyond image 1, which is 80 x 60 pixels"),
        ({"points": [[5, 5]], "color": "reddish"}, "'reddish' is no color; write a name"),
        ({"points": [[5]]}, "points.0: List should have at least 2 items"),
        ({"points": [[5, 5]] * (MAX_SHAPES + 1)}, "points: List should have at most 20 items"),
        ({"points": [[5, 5]], "label": "x" * 41}, "label: String should have at most 40 characters"),
        ({"points": [[5, 5]], "target_image": 7}, "there is no image 7"),
    ],
)
async def test_what_is_wrong_is_told_to_the_model(arguments: dict[str, object], told: str) -> None:
    text, images = await Looker("draw", [quarters()]).call("draw", **arguments)
    assert told in text
    assert images == []
