"""What the checks of the tools for images share: an image, calls about it, and cases that hold for each of them."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from verl_tool.content.parts import ImagePart, encode_image, parts_of, to_wire
from verl_tool.protocol import IMAGES_FIELD, StepResult
from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, call, one_by_one

RED, BLUE = (255, 0, 0), (0, 0, 255)


def picture() -> ImagePart:
    """80 x 60 pixels: the left half is red, the right half blue."""
    image = Image.new("RGB", (80, 60), RED)
    image.paste(BLUE, (40, 0, 80, 60))
    return encode_image(image)


def looks(
    tool: str,
    arguments: dict[str, object],
    *contains: str,
    images: int = 1,
    size: tuple[int, int] = (0, 0),
    colors: Sequence[tuple[int, int, int]] = (),
    first: tuple[int, int, int] = RED,
    count: int = 0,
) -> LiveTurn:
    """A call about so many such images, answered with `count` images of this size and these colours, the `first` of
    which is at the top left."""

    def problem(result: StepResult) -> str:
        parts = parts_of(result.observation, result.image)
        seen = [part.decode() for part in parts if isinstance(part, ImagePart)]
        found = [
            (each.size, each.getpixel((0, 0)), {color for _, color in each.getcolors(1 << 20) or ()}) for each in seen
        ]
        expected = [(size, first, set(colors))] * count
        return "" if found == expected else f"images {found!r:.200} and not {expected}"

    extra = {IMAGES_FIELD: [to_wire(picture())] * images}
    return LiveTurn(call(tool, **arguments), contains, valid=None, extra=extra, problem=problem)


def wrong(tool: str, arguments: dict[str, object], words: str, what: str) -> LiveCase:
    """A call that is answered with what is wrong about it, and no image."""
    return LiveCase(f"the model is told: {what}", one_by_one(looks(tool, arguments, "Error: ", words)))


def common(tool: str, arguments: dict[str, object], missing: dict[str, object] | None = None) -> Sequence[LiveCase]:
    """Cases of every tool, by arguments that are right; `missing`: those of an image that is not there."""
    none = looks(tool, arguments, "there is no image yet", images=0)
    there_is_none = wrong(tool, missing or {**arguments, "target_image": 2}, "there is no image 2", "no such image")
    return (LiveCase("a trajectory without images", one_by_one(none)), there_is_none)
