"""Shows a part of an image, with all the pixels that its original has there."""

from __future__ import annotations

from verl_tool.content.parts import ImagePart
from verl_tool.servers.tools.pictures.boxes import FourNumbers
from verl_tool.servers.tools.pictures.picture_tools import PictureTools
from verl_tool.servers.tools.pictures.views import Crop
from verl_tool.servers.tools.typed.function_tool import tool

_CALL = '<tool_call>\n{"name": "%s", "arguments": {"bbox_2d": %s, "target_image": 1}}\n</tool_call>'


class ZoomIn(PictureTools):
    """Crops of a trajectory's images."""

    @tool(
        aliases=("crop_image", "crop_image_normalized", "image_zoom_in_tool"),
        example_actions=(
            _CALL % ("zoom_in", [10, 20, 210, 120]),
            _CALL % ("crop_image", [10, 20, 210, 120]),
            _CALL % ("crop_image_normalized", [0.1, 0.2, 0.5, 0.6]),
        ),
    )
    def zoom_in(self, bbox_2d: FourNumbers, target_image: int = 1, label: str = "") -> list[str | ImagePart]:
        """Zoom in on a part of an image.

        Args:
            bbox_2d: The part, as [x1, y1, x2, y2] in pixels of the image or as fractions of its sides.
            target_image: Number of the image, counted from 1 over all images so far.
            label: What you look for there.
        """
        box = self.box(target_image, bbox_2d, self.options.min_side)
        return self.describe_picture("Here is the cropped image.", self.picture(target_image, Crop(box)))
