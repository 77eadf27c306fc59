"""``python -m verl_tool.servers.tests.test_rotate_tool rotate --url=http://localhost:5000/get_observation``"""

from verl_tool.servers.tests.image_cases import BLUE, RED, common, looks, wrong
from verl_tool.servers.tests.live_check import LiveCase, command_line, one_by_one

_RIGHT_ANGLE = looks(
    "rotate",
    {"angle": 90},
    "rotated by 90 degrees. (Image 2, Image Size: 60x80)",
    size=(60, 80),
    colors=(RED, BLUE),
    # Clockwise, the left half comes to the top.
    first=RED,
    count=1,
)

CASES = (
    LiveCase("a right angle, clockwise", one_by_one(_RIGHT_ANGLE)),
    *common("rotate", {"angle": 30}),
    wrong("rotate", {"angle": "left"}, "valid number", "a text"),
)

app = command_line(__name__, "rotate", "rotate", CASES)
