"""``python -m verl_tool.servers.tests.test_pixel_reasoner_tool pixel_reasoner --url=…/get_observation``"""

from dataclasses import replace

from verl_tool.content.parts import to_wire
from verl_tool.protocol import IMAGES_FIELD
from verl_tool.servers.tests.image_cases import picture
from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, call, command_line, one_by_one
from verl_tool.servers.tests.test_select_frames_tool import CASES as FRAMES
from verl_tool.servers.tests.test_zoom_in_tool import CASES as CROPS

_IMAGES = {IMAGES_FIELD: [to_wire(picture())] * 2}
_TOGETHER = [
    LiveTurn(call("select_frames", target_frames=[2]), ("(Images 3 to 3, Frame Size: 80x60)",), extra=_IMAGES),
    LiveTurn(call("zoom_in", bbox_2d=[0, 0, 20, 20], target_image=3), ("(Image 4, Image Size: 20x20)",)),
    LiveTurn(call("zoom_in", bbox_2d=[0.5, 0, 1, 0.5], target_image=4), ("(Image 5, Image Size: 10x10)",)),
]

CASES = (
    *(replace(case, name=f"zoom_in: {case.name}") for case in CROPS),
    *(replace(case, name=f"select_frames: {case.name}") for case in FRAMES),
    LiveCase("both count the images of a trajectory together", one_by_one(_TOGETHER)),
)

app = command_line(__name__, "pixel_reasoner", "zoom_in", CASES)
