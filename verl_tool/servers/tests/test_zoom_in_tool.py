"""``python -m verl_tool.servers.tests.test_zoom_in_tool zoom_in --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

from verl_tool.servers.tests.image_cases import BLUE, RED, common, has_colors, looks, wrong
from verl_tool.servers.tests.live_check import LiveCase, Probe, command_line


async def _crops(probe: Probe) -> None:
    for name in ("zoom_in", "crop_image", "crop_image_normalized"):
        for box in ([30, 0, 50, 20], [0.375, 0, 0.625, 1 / 3]):
            description = "Here is the cropped image. (Image 2, Image Size: 20x20)"
            [image] = await looks(probe, {"bbox_2d": box, "target_image": 1}, description, name=name)
            has_colors(image, (20, 20), RED, BLUE)


CASES = (
    LiveCase("crops by pixels and by fractions", _crops),
    *common({"bbox_2d": [0, 0, 20, 20]}),
    wrong({"bbox_2d": [90, 0, 99, 9]}, "lies outside of the image. The image is 80 x 60 pixels", "outside"),
    wrong({"bbox_2d": [20, 0, 10, 9]}, "wrong order", "corners in the wrong order"),
    wrong({"bbox_2d": [0, 0, 20]}, "at least 4 items", "too few numbers"),
    wrong({"bbox_2d": [0, 0, "x", 9]}, "valid number", "a text"),
)

app = command_line("zoom_in", "zoom_in", CASES, "Check the tool zoom_in of a live server.")

if __name__ == "__main__":
    app()
