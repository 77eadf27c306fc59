"""``python -m verl_tool.servers.tests.test_draw_tool draw --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

from verl_tool.servers.tests.image_cases import BLUE, RED, common, has_colors, looks, wrong
from verl_tool.servers.tests.live_check import LiveCase, Probe, command_line


async def _shapes(probe: Probe) -> None:
    for shape in ({"boxes": [[10, 10, 30, 30]]}, {"lines": [[10, 10, 30, 10]]}):
        [image] = await looks(probe, {**shape, "color": "yellow"}, "Here is the image with what you drew. (Image 2")
        has_colors(image, (80, 60), RED, BLUE, (255, 255, 0))


CASES = (
    LiveCase("boxes and lines in a color", _shapes),
    *common({"points": [[10, 10]]}),
    wrong({"points": [[90, 10]]}, "reaches beyond image 1, which is 80 x 60 pixels", "outside"),
    wrong({"points": [[9, 9]], "color": "no"}, "'no' is no color", "no color"),
    wrong({}, "nothing to draw", "nothing to draw"),
)

app = command_line("draw", "draw", CASES, "Check the tool draw of a live server.")

if __name__ == "__main__":
    app()
