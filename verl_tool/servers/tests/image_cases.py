"""What the checks of the tools for images share: an image, calls about it, and cases that hold for each of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from PIL import Image

from verl_tool.content.parts import ImagePart, encode_image, parts_of, to_wire
from verl_tool.protocol import IMAGES_FIELD
from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe

RED, BLUE = (255, 0, 0), (0, 0, 255)


def picture() -> ImagePart:
    """80 x 60 pixels: the left half is red, the right half blue."""
    image = Image.new("RGB", (80, 60), RED)
    image.paste(BLUE, (40, 0, 80, 60))
    return encode_image(image)


async def looks(
    probe: Probe, arguments: dict[str, object], *told: str, images: int = 1, name: str | None = None
) -> list[Image.Image]:
    """What a call shows about so many such images; its text holds each of `told`."""
    call = json.dumps({"name": name or probe.tool.name, "arguments": arguments})
    extra = {IMAGES_FIELD: [to_wire(picture())] * images}
    result = await probe.answer(f"<tool_call>{call}</tool_call>", extra=extra)
    for text in told:
        if text not in result.observation:
            raise CheckFailed(f"{text!r} is missing in the answer {result.observation!r:.300} to {call:.100}")
    parts = parts_of(result.observation, result.image)
    return [part.decode() for part in parts if isinstance(part, ImagePart)]


def has_colors(image: Image.Image, size: tuple[int, int], *colors: tuple[int, int, int]) -> None:
    """Raises CheckFailed if an image has another size, or other colours."""
    found = {color for _, color in image.getcolors(1 << 20) or ()}
    if image.size != size or found != set(colors):
        raise CheckFailed(f"an image of {image.size} with {sorted(found)[:5]}; expected {size} with {sorted(colors)}")


def wrong(arguments: dict[str, object], told: str, what: str) -> LiveCase:
    """A call that is answered with what is wrong about it."""

    async def refused(probe: Probe) -> None:
        if await looks(probe, arguments, "Error: ", told):
            raise CheckFailed("the answer holds an image")

    return LiveCase(f"the model is told: {what}", refused)


def common(arguments: dict[str, object], missing: dict[str, object] | None = None) -> Sequence[LiveCase]:
    """Cases of every tool, by arguments that are right; `missing`: those of an image that is not there."""

    async def none(probe: Probe) -> None:
        await looks(probe, arguments, "there is no image yet", images=0)

    there_is_none = wrong(missing or {**arguments, "target_image": 2}, "there is no image 2", "no such image")
    return (LiveCase("a trajectory without images", none), there_is_none)
