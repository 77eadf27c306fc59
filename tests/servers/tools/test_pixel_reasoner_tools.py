from __future__ import annotations

import json

from live_server import LiveServers
from quarters import BLUE, Looker, noise, quarters, same
from toy_images import LookingEngine, ToyImageTokens, image_tokenizer

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tokenizer import render_prompt
from verl_tool.agent_loop.trajectory import StopReason
from verl_tool.client import ToolClient
from verl_tool.content.parts import encode_image
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


async def test_a_model_looks_closer_and_closer_over_http() -> None:
    calls = [("zoom_in", {"bbox_2d": [0.5, 0, 1, 1]}), ("zoom_in", {"bbox_2d": [0, 0, 10, 20], "target_image": 2})]
    turns = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    tokenizer, whole = image_tokenizer(), encode_image(noise())
    engine = LookingEngine(tokenizer, [*(f"<tool_call>{turn}</tool_call>" for turn in turns), "a cat"])
    options = EpisodeOptions.load({"action_stop_tokens": ["</tool_call>"], "max_response_length": 2000})
    prompt = render_prompt(tokenizer, [{"role": "user", "content": [{"type": "image"}]}])
    servers = LiveServers()
    try:
        live = await servers.start(load_tools("pixel_reasoner"))
        async with ToolClient(live.observations_url) as client:
            episode = Episode(engine, client, tokenizer, options, image_tokens=ToyImageTokens(tokenizer))
            trajectory = await episode.run(prompt, images=[whole])
    finally:
        await servers.stop()
    assert trajectory.stop is StopReason.ANSWERED
    first, half, corner = trajectory.visible_images
    assert engine.seen == [[first], [first, half], [first, half, corner]]
    assert same(half.decode(), noise().crop((40, 0, 80, 60)))
    assert same(corner.decode(), noise().crop((40, 0, 50, 20)))
