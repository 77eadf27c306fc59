from __future__ import annotations

import pytest
from PIL import Image
from quarters import Looker, noise, same

from verl_tool.servers.tools.select_frames import MAX_FRAMES

FRAMES = [noise(40, 30, seed) for seed in range(5)]


async def test_frames_are_shown_as_they_were_sent() -> None:
    looker = Looker("select_frames", FRAMES)
    text, images = await looker.call("select_frames", target_frames=[4, 2, 4])
    assert text == "Here are the selected frames. (Images 6 to 8, Frame Size: 40x30)"
    assert [same(*each) for each in zip(images, (FRAMES[3], FRAMES[1], FRAMES[3]), strict=True)] == [True] * 3
    _, [again] = await looker.call("select_frames", target_frames=[7])
    assert same(again, FRAMES[1])


async def test_a_frame_is_the_same_file() -> None:
    looker = Looker("select_frames", FRAMES)
    result = await looker.answer("<select_frames>[2]</select_frames>")
    assert result.image == [looker.images[1]]


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([], "target_frames: List should have at least 1 item"),
        (list(range(MAX_FRAMES + 1)), "target_frames: List should have at most 16 items"),
        ([1, 6], "there is no image 6; images are counted from 1, and there are 5"),
        ([1.5], "target_frames.0: Input should be a valid integer"),
        ("all", "target_frames: Input should be a valid list"),
    ],
)
async def test_what_is_wrong_is_told_to_the_model(frames: object, told: str) -> None:
    text, images = await Looker("select_frames", FRAMES).call("select_frames", target_frames=frames)
    assert told in text
    assert images == []


async def test_frames_that_are_too_large_together_are_refused() -> None:
    frame = noise(1600, 1600)
    looker = Looker("select_frames", [frame.transpose(Image.Transpose.ROTATE_90)], max_pixels=4 << 20)
    text, _ = await looker.call("select_frames", target_frames=[1] * 8)
    assert "in one observation; at most" in text
