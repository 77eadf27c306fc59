"""``python -m verl_tool.servers.tests.test_select_frames_tool select_frames --url=…/get_observation``"""

from verl_tool.servers.tests.image_cases import BLUE, RED, common, looks, wrong
from verl_tool.servers.tests.live_check import LiveCase, command_line, one_by_one

_FRAMES = looks(
    "select_frames",
    {"target_frames": [1, 3]},
    "Here are the selected frames. (Images 4 to 5, Frame Size: 80x60)",
    images=3,
    size=(80, 60),
    colors=(RED, BLUE),
    count=2,
)

CASES = (
    LiveCase("frames by their numbers", one_by_one(_FRAMES)),
    *common("select_frames", {"target_frames": [1]}, {"target_frames": [1, 2]}),
    wrong("select_frames", {"target_frames": []}, "at least 1 item", "no frame"),
    wrong("select_frames", {"target_frames": [1] * 99}, "at most 16 items", "too many frames"),
)

app = command_line(__name__, "select_frames", "select_frames", CASES)
