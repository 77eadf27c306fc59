"""``python -m verl_tool.servers.tests.test_pixel_reasoner_tool pixel_reasoner --url=…/get_observation``"""

from __future__ import annotations

import json

from verl_tool.content.parts import to_wire
from verl_tool.protocol import IMAGES_FIELD
from verl_tool.servers.tests.image_cases import picture
from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe, command_line
from verl_tool.servers.tests.test_select_frames_tool import CASES as FRAMES
from verl_tool.servers.tests.test_zoom_in_tool import CASES as CROPS


def _for(name: str, case: LiveCase) -> LiveCase:
    """A case of the one or the other tool."""

    async def run(probe: Probe) -> None:
        tool = probe.tool.model_copy(update={"name": name})
        await case.run(Probe(probe.client, tool))

    return LiveCase(f"{name}: {case.name}", run)


async def _together(probe: Probe) -> None:
    trajectory, extra = probe.new_id(), {IMAGES_FIELD: [to_wire(picture())] * 2}
    turns = (
        ("select_frames", {"target_frames": [2]}, "(Images 3 to 3, Frame Size: 80x60)"),
        ("zoom_in", {"bbox_2d": [0, 0, 20, 20], "target_image": 3}, "(Image 4, Image Size: 20x20)"),
        ("zoom_in", {"bbox_2d": [0.5, 0, 1, 0.5], "target_image": 4}, "(Image 5, Image Size: 10x10)"),
    )
    for step, (name, arguments, description) in enumerate(turns):
        call = json.dumps({"name": name, "arguments": arguments})
        result = await probe.answer(
            f"<tool_call>{call}</tool_call>", trajectory_id=trajectory, step=step, extra=extra if step == 0 else None
        )
        if description not in result.observation:
            raise CheckFailed(f"{description!r} is missing in the answer {result.observation!r:.300} to {call:.100}")
    await probe.client.finish([trajectory])


CASES = (
    *(_for("zoom_in", case) for case in CROPS),
    *(_for("select_frames", case) for case in FRAMES),
    LiveCase("both count the images of a trajectory together", _together),
)

app = command_line("pixel_reasoner", "zoom_in", CASES, "Check the tools of pixel_reasoner of a live server.")

if __name__ == "__main__":
    app()
