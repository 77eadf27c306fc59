"""What the tools share in a trajectory, behind a tool set."""

from __future__ import annotations

import asyncio

import pytest
from quarters import GREEN, Looker, noise, quarters, same
from toy_tools import Puppet, picture

from verl_tool.content.parts import ImagePart, parts_of, read_media, to_wire
from verl_tool.protocol import IMAGES_FIELD, FaultKind, StepRequest, StepResult
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.pictures.picture_tools import PictureTools

ZOOM = '<tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": %s, "target_image": %d}}</tool_call>'
CORNER = ZOOM % ([0, 0, 8, 8], 1)


def test_all_of_them_share_one_state() -> None:
    tools = load_tools("zoom_in,rotate,draw,measure,select_frames")
    assert len({tool.state_group for tool in tools}) == 1
    assert all(tool.takes_media == (ImagePart,) for tool in tools)
    assert {tool.owner for tool in load_tools("pixel_reasoner")} == {PictureTools}


async def test_one_tool_goes_on_from_what_another_has_shown() -> None:
    looker = Looker("rotate,zoom_in,select_frames", [quarters()])
    await looker.call("zoom_in", bbox_2d=[40, 0, 80, 30])
    await looker.call("rotate", angle=90, target_image=2)
    _, [last] = await looker.call("select_frames", target_frames=[3])
    assert last.getcolors() == [(1200, GREEN)]
    assert last.size == (30, 40)


async def test_images_come_with_the_first_action_whatever_it_calls() -> None:
    puppet = Puppet()
    toolset = ToolSet([puppet, *load_tools("zoom_in")])
    images = {IMAGES_FIELD: [to_wire(picture(7, (20, 20)))]}
    for trajectory, action in (("a", "<puppet>say hi</puppet>"), ("b", "no call at all")):
        await toolset.step([StepRequest(trajectory, action, 0, extra=images)])
        [result] = await toolset.step([StepRequest(trajectory, CORNER, 1)])
        assert same(result.image[0].decode(), picture(7, (8, 8)).decode())


async def test_images_of_other_tools_are_counted() -> None:
    toolset = ToolSet([Puppet(), *load_tools("zoom_in,rotate")])
    await toolset.step([StepRequest("t", "<puppet>pictures 1 2</puppet>", 0)])
    [result] = await toolset.step([StepRequest("t", ZOOM % ("[0, 0, 3, 3]", 2), 1)])
    assert "has only 3 x 3 pixels" in result.observation
    [result] = await toolset.step([StepRequest("t", ZOOM % ("[0, 0, 3, 3]", 3), 2)])
    assert "there is no image 3; images are counted from 1, and there are 2" in result.observation


async def test_a_server_without_such_a_tool_lets_images_be() -> None:
    puppet = Puppet()
    [result] = await ToolSet([puppet]).step([StepRequest("t", "<puppet>say hi</puppet>", 0, extra={IMAGES_FIELD: 5})])
    assert result.fault is None


async def test_a_step_that_is_sent_again_counts_once() -> None:
    looker = Looker("zoom_in", [quarters()])
    extra = {IMAGES_FIELD: [to_wire(image) for image in looker.images]}
    same_step = [StepRequest("t", CORNER, 0, extra=extra)] * 2
    answers = [(await looker.toolset.step([request]))[0].observation for request in same_step]
    assert answers[0] == answers[1]
    looker.step = 1
    assert "(Image 3, " in (await looker.answer(CORNER)).observation


async def test_a_fork_goes_on_by_itself() -> None:
    looker = Looker("zoom_in", [quarters()])
    await looker.call("zoom_in", bbox_2d=[40, 0, 80, 30])
    await looker.toolset.fork("t", "other")
    seen = [
        (await looker.call("zoom_in", trajectory, bbox_2d=[0, 0, 9, 9], target_image=2))
        for trajectory in ("t", "other")
    ]
    assert [text for text, _ in seen] == ["Here is the cropped image. (Image 3, Image Size: 9x9)"] * 2
    assert seen[1][1][0].getcolors() == [(81, GREEN)]


@pytest.mark.parametrize(
    "images", [["/etc/passwd"], ["data:image/png;base64,AAAA"], [5], "data:audio/flac;base64,ZkxhQw=="]
)
async def test_images_that_cannot_be_read_are_a_fault_that_no_model_can_cause(images: object) -> None:
    [result] = await ToolSet(load_tools("zoom_in")).step([StepRequest("t", CORNER, 0, extra={IMAGES_FIELD: images})])
    assert result.fault is not None
    assert result.fault.kind is FaultKind.MISCONFIGURED
    assert "images" in result.fault.message


async def test_a_broken_image_is_told_to_the_model() -> None:
    looker = Looker("zoom_in", [noise()])
    looker.images = [read_media(looker.images[0].data[:300])]
    text, _ = await looker.call("zoom_in", bbox_2d=[0, 0, 30, 30])
    assert text.startswith("Error: image 1 cannot be shown: image/png of 300 bytes cannot be decoded")


async def test_more_images_than_an_observation_holds_are_an_error_of_the_model() -> None:
    looker = Looker("zoom_in", [quarters()])
    result = await looker.answer(CORNER * 66)
    assert len(parts_of(result.observation, result.image)) > 64
    assert len(result.image) == 64
    assert result.observation.count("Error: 65 images and audios in one observation; at most 64: give fewer") == 2
    assert "(Image 66, " in (await looker.answer(CORNER)).observation


async def test_trajectories_do_not_see_each_other() -> None:
    toolset = ToolSet(load_tools("zoom_in"))

    async def corner(trajectory: str, red: int) -> StepResult:
        extra = {IMAGES_FIELD: [to_wire(picture(red, (20, 20)))]}
        return (await toolset.step([StepRequest(trajectory, CORNER, 0, extra=extra)]))[0]

    results = await asyncio.gather(*(corner(str(red), red) for red in range(20)))
    for red, result in enumerate(results):
        assert result.image[0].decode().getpixel((0, 0)) == (red, 0, 0)
