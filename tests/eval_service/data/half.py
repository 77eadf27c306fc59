"""A tool for tests: the left half of one of the prompt's images, from the original, half of the last half and so on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from verl_tool.content.parts import encode_image, from_wire
from verl_tool.formats import Call
from verl_tool.protocol import IMAGES_FIELD
from verl_tool.servers.tools.base import Context, Tool, ToolResult


class Half(Tool):
    """``<half>1</half>``: of the first image."""

    name = "half"
    description = "Shows the left half of an image."
    example_actions = ("<half>1</half>",)
    stateful: ClassVar[bool] = True

    async def create_state(self, trajectory_id: str, extra: Mapping[str, Any]) -> list[Any]:
        return [from_wire(image).decode() for image in extra.get(IMAGES_FIELD, ())]

    async def run(self, call: Call, context: Context) -> ToolResult:
        n = int(call.input.strip()) - 1
        image = context.state[n]
        context.state[n] = half = image.crop((0, 0, image.width // 2, image.height))
        return ToolResult(parts=["half: ", encode_image(half)])
