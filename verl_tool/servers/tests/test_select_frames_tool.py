"""``python -m verl_tool.servers.tests.test_select_frames_tool select_frames --url=…/get_observation``"""

from __future__ import annotations

from verl_tool.servers.tests.image_cases import BLUE, RED, common, has_colors, looks, wrong
from verl_tool.servers.tests.live_check import LiveCase, Probe, command_line


async def _frames(probe: Probe) -> None:
    description = "Here are the selected frames. (Images 4 to 5, Frame Size: 80x60)"
    for image in await looks(probe, {"target_frames": [1, 3]}, description, images=3):
        has_colors(image, (80, 60), RED, BLUE)


CASES = (
    LiveCase("frames by their numbers", _frames),
    *common({"target_frames": [1]}, {"target_frames": [1, 2]}),
    wrong({"target_frames": []}, "at least 1 item", "no frame"),
    wrong({"target_frames": [1] * 99}, "at most 16 items", "too many frames"),
)

app = command_line("select_frames", "select_frames", CASES, "Check the tool select_frames of a live server.")

if __name__ == "__main__":
    app()
