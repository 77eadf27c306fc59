"""``python -m verl_tool.servers.tests.test_measure_tool measure --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

from verl_tool.servers.tests.image_cases import common, looks, wrong
from verl_tool.servers.tests.live_check import LiveCase, Probe, command_line


async def _lengths(probe: Probe) -> None:
    await looks(probe, {"points": [[10, 10], [40, 50]]}, "point 1 to point 2: 50.0 pixels (30.0 across, 40.0 down)")
    await looks(probe, {"bbox_2d": [0, 0, 0.5, 0.5]}, "box: 40 x 30 pixels, area 1200")
    await looks(probe, {}, "image 1: 80 x 60 pixels")


CASES = (
    LiveCase("distances and sizes", _lengths),
    *common({"points": [[1, 1], [2, 2]]}),
    wrong({"points": [[1, 1]]}, "a distance needs two points", "one point"),
)

app = command_line("measure", "measure", CASES, "Check the tool measure of a live server.")

if __name__ == "__main__":
    app()
