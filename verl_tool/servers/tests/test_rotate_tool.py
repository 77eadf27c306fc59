"""``python -m verl_tool.servers.tests.test_rotate_tool rotate --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

from verl_tool.servers.tests.image_cases import BLUE, RED, common, has_colors, looks, wrong
from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe, command_line


async def _right_angle(probe: Probe) -> None:
    [image] = await looks(probe, {"angle": 90}, "rotated by 90 degrees. (Image 2, Image Size: 60x80)")
    has_colors(image, (60, 80), RED, BLUE)
    if image.getpixel((0, 0)) != RED:
        raise CheckFailed("the left half does not come to the top: it is not clockwise")


CASES = (
    LiveCase("a right angle, clockwise", _right_angle),
    *common({"angle": 30}),
    wrong({"angle": "left"}, "valid number", "a text"),
)

app = command_line("rotate", "rotate", CASES, "Check the tool rotate of a live server.")

if __name__ == "__main__":
    app()
