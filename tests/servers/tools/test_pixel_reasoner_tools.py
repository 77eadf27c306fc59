from __future__ import annotations

from quarters import BLUE, Looker, noise, quarters, same

from verl_tool.servers.tools import load_tools


def test_the_name_is_that_of_two_tools() -> None:
    assert [tool.name for tool in load_tools("pixel_reasoner")] == ["zoom_in", "select_frames"]
    assert [tool.name for tool in load_tools("crop_image")] == ["zoom_in"]


async def test_both_tools_see_what_the_other_has_shown() -> None:
    looker = Looker("pixel_reasoner", [noise(), quarters()])
    await looker.call("select_frames", target_frames=[2, 1])
    image = await looker.image("zoom_in", bbox_2d=[0, 30, 40, 60], target_image=3)
    assert image.getcolors() == [(1200, BLUE)]
    _, [again] = await looker.call("select_frames", target_frames=[5])
    assert same(again, image)
