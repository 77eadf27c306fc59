"""``python -m verl_tool.servers.tests.test_measure_tool measure --url=http://localhost:5000/get_observation``"""

from verl_tool.servers.tests.image_cases import common, looks, wrong
from verl_tool.servers.tests.live_check import LiveCase, command_line, one_by_one

_LENGTH = "point 1 to point 2: 50.0 pixels (30.0 across, 40.0 down)"

CASES = (
    LiveCase(
        "distances and sizes",
        one_by_one(
            looks("measure", {"points": [[10, 10], [40, 50]]}, _LENGTH),
            looks("measure", {"bbox_2d": [0, 0, 0.5, 0.5]}, "box: 40 x 30 pixels, area 1200"),
            looks("measure", {}, "image 1: 80 x 60 pixels"),
        ),
    ),
    *common("measure", {"points": [[1, 1], [2, 2]]}),
    wrong("measure", {"points": [[1, 1]]}, "a distance needs two points", "one point"),
)

app = command_line(__name__, "measure", "measure", CASES)
