from __future__ import annotations

import pytest
from quarters import Looker, noise, quarters


async def test_distances_from_point_to_point() -> None:
    text, images = await Looker("measure", [quarters()]).call("measure", points=[[10, 20], [40, 60], [40, 50]])
    assert text == (
        "point 1 to point 2: 50.0 pixels (30.0 across, 40.0 down)\n"
        "point 2 to point 3: 10.0 pixels (0.0 across, 10.0 down)"
    )
    assert images == []


async def test_the_size_of_a_box_and_of_an_image() -> None:
    looker = Looker("measure", [quarters()])
    text, _ = await looker.call("measure", bbox_2d=[0, 0, 0.5, 0.5])
    assert text == "box: 40 x 30 pixels, area 1200, diagonal 50.0"
    assert (await looker.call("measure"))[0] == "image 1: 80 x 60 pixels"


async def test_what_is_seen_smaller_is_measured_on_the_original() -> None:
    looker = Looker("measure,zoom_in", [noise(400, 300)], max_pixels=1200)
    overview = await looker.image("zoom_in", bbox_2d=[0, 0, 1, 1])
    assert overview.size == (40, 30)
    text, _ = await looker.call("measure", points=[[0, 10], [30, 10]], target_image=2)
    assert text == "point 1 to point 2: 300.0 pixels (300.0 across, 0.0 down)"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"points": [[1, 2]]}, "a distance needs two points"),
        ({"bbox_2d": [10, 10, 10, 20]}, "is empty, or its corners"),
        ({"points": [[1, 2], [3]]}, "points.1: List should have at least 2 items"),
        ({"points": [[1, 2], [3, 4]], "target_image": 2}, "there is no image 2"),
    ],
)
async def test_what_is_wrong_is_told_to_the_model(arguments: dict[str, object], told: str) -> None:
    assert told in (await Looker("measure", [quarters()]).call("measure", **arguments))[0]
