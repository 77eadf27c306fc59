from __future__ import annotations

import pytest

from tests.servers.tools.actions import results
from verl_tool.protocol import StepRequest
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools.finish import FinishTool


@pytest.mark.parametrize("action", FinishTool.example_actions)
async def test_every_example_action_ends_the_trajectory(action: str) -> None:
    [result] = await results(FinishTool(), action)
    assert result.done
    assert result.valid


@pytest.mark.parametrize("action", ["I finish now.", "<finisher>1</finisher>", '{"name": "finished"}', "finish"])
def test_talk_of_finishing_is_no_call(action: str) -> None:
    assert FinishTool().recognise(action) == []


async def test_the_server_forgets_a_finished_trajectory() -> None:
    toolset = ToolSet([FinishTool()])
    await toolset.start()
    try:
        [result] = await toolset.step([StepRequest("t", "Result=42<submit>")])
        assert (result.done, result.valid, result.observation) == (True, True, "")
    finally:
        await toolset.close()
