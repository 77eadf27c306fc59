"""Shows some frames of a video again, whose frames are the images of the prompt."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from verl_tool.content.parts import ImagePart, reject_too_much
from verl_tool.errors import ContentError
from verl_tool.servers.tools.base import CallError
from verl_tool.servers.tools.pictures.picture_tools import PictureTools
from verl_tool.servers.tools.typed.function_tool import tool

MAX_FRAMES = 16


class SelectFrames(PictureTools):
    """A trajectory's images by their numbers."""

    @tool(
        example_actions=(
            '<tool_call>\n{"name": "select_frames", "arguments": {"target_frames": [1, 3]}}\n</tool_call>',
        )
    )
    def select_frames(
        self, target_frames: Annotated[list[int], Field(min_length=1, max_length=MAX_FRAMES)]
    ) -> list[str | ImagePart]:
        """Look at some frames of the video again.

        Args:
            target_frames: Numbers of the frames, counted from 1 over all images so far.
        """
        frames = [self.picture(number, None) for number in target_frames]
        try:
            reject_too_much(frames)
        except ContentError as error:
            raise CallError(str(error)) from error
        first, last = self.count + 1, self.count + len(frames)
        size = f"{frames[0].width}x{frames[0].height}"
        return [f"Here are the selected frames. (Images {first} to {last}, Frame Size: {size})\n", *frames]
