from __future__ import annotations

import pytest
from PIL import Image
from quarters import Looker, noise, quarters, same


@pytest.mark.parametrize(
    ("angle", "way"),
    [(90, Image.Transpose.ROTATE_270), (-90, Image.Transpose.ROTATE_90), (180, Image.Transpose.ROTATE_180)],
)
async def test_right_angles_keep_each_pixel_and_are_clockwise(angle: float, way: Image.Transpose) -> None:
    text, [image] = await Looker("rotate", [noise()]).call("rotate", angle=angle)
    assert text.startswith(f"Here is the image, rotated by {angle} degrees. (Image 2, Image Size: ")
    assert same(image, noise().transpose(way))


async def test_other_angles_show_all_of_it_on_white() -> None:
    image = await Looker("rotate", [quarters(100, 100)]).image("rotate", angle=45)
    assert abs(image.width - 141) <= 2
    assert image.getpixel((0, 0)) == (255, 255, 255)
    assert image.getpixel((70, 30)) == (255, 0, 0)


async def test_a_rotated_image_is_cropped_of_the_originals_pixels() -> None:
    looker = Looker("rotate,zoom_in", [noise(400, 300)], max_pixels=1024)
    await looker.call("rotate", angle=90)
    crop = await looker.image("zoom_in", bbox_2d=[0, 0, 0.1, 0.05], target_image=2)
    assert same(crop, noise(400, 300).transpose(Image.Transpose.ROTATE_270).crop((0, 0, 30, 20)))


async def test_an_image_cannot_be_made_to_grow_without_end() -> None:
    looker = Looker("rotate,zoom_in", [quarters(2000, 2000)])
    assert (await looker.call("rotate", angle=45))[1]
    assert (await looker.call("zoom_in", bbox_2d=[0, 0, 1, 1], target_image=2))[1]
    assert (await looker.call("rotate", angle=45, target_image=3))[1]
    text, images = await looker.call("rotate", angle=45, target_image=4)
    assert "at most 16777216 are possible; zoom in on a part of it first" in text
    assert images == []
