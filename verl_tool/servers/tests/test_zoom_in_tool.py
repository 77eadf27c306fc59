"""``python -m verl_tool.servers.tests.test_zoom_in_tool zoom_in --url=http://localhost:5000/get_observation``"""

from verl_tool.servers.tests.image_cases import BLUE, RED, common, looks, wrong
from verl_tool.servers.tests.live_check import LiveCase, command_line, one_by_one

_CROPS = [
    looks(
        name,
        {"bbox_2d": box, "target_image": 1},
        "Here is the cropped image. (Image 2, Image Size: 20x20)",
        size=(20, 20),
        colors=(RED, BLUE),
        count=1,
    )
    for name in ("zoom_in", "crop_image", "crop_image_normalized")
    for box in ([30, 0, 50, 20], [0.375, 0, 0.625, 1 / 3])
]

CASES = (
    LiveCase("crops by pixels and by fractions", one_by_one(*_CROPS)),
    *common("zoom_in", {"bbox_2d": [0, 0, 20, 20]}),
    wrong("zoom_in", {"bbox_2d": [90, 0, 99, 9]}, "lies outside of the image. The image is 80 x 60 pixels", "outside"),
    wrong("zoom_in", {"bbox_2d": [20, 0, 10, 9]}, "wrong order", "corners in the wrong order"),
    wrong("zoom_in", {"bbox_2d": [0, 0, 20]}, "at least 4 items", "too few numbers"),
    wrong("zoom_in", {"bbox_2d": [0, 0, "x", 9]}, "valid number", "a text"),
)

app = command_line(__name__, "zoom_in", "zoom_in", CASES)
