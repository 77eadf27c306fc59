"""``python -m verl_tool.servers.tests.test_draw_tool draw --url=http://localhost:5000/get_observation``"""

from functools import partial

from verl_tool.servers.tests.image_cases import BLUE, RED, common, looks, wrong
from verl_tool.servers.tests.live_check import LiveCase, command_line, one_by_one

_drawn = partial(looks, size=(80, 60), colors=(RED, BLUE, (255, 255, 0)), count=1)
_WORDS = "Here is the image with what you drew. (Image 2"

CASES = (
    LiveCase(
        "boxes and lines in a color",
        one_by_one(
            _drawn("draw", {"boxes": [[10, 10, 30, 30]], "color": "yellow"}, _WORDS),
            _drawn("draw", {"lines": [[10, 10, 30, 10]], "color": "yellow"}, _WORDS),
        ),
    ),
    *common("draw", {"points": [[10, 10]]}),
    wrong("draw", {"points": [[90, 10]]}, "reaches beyond image 1, which is 80 x 60 pixels", "outside"),
    wrong("draw", {"points": [[9, 9]], "color": "no"}, "'no' is no color", "no color"),
    wrong("draw", {}, "nothing to draw", "nothing to draw"),
)

app = command_line(__name__, "draw", "draw", CASES)
