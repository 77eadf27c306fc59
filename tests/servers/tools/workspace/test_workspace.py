"""One workspace for the tools that are served together, one after the other, until the trajectory ends."""

from __future__ import annotations

import json

import pytest

from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.errors import ConfigError
from verl_tool.protocol import VERIFY_FIELD, StepRequest
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.workspace import pools
from verl_tool.verification import Verification

pytestmark = pytest.mark.slow

TOGETHER = {"workers": 1, "warm_modules": (), "max_sessions": 1}


def edit(**arguments: object) -> str:
    call = {"name": "str_replace_editor", "arguments": arguments}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


async def test_tools_that_are_served_together_share_a_trajectorys_files() -> None:
    earlier = set(pools._shared)
    served = ToolSet(load_tools("ipython_code,str_replace_editor", shared=TOGETHER))
    await served.start()
    try:
        assert len(set(pools._shared) - earlier) == 1

        async def step(trajectory: str, action: str, number: int, finish: bool = False) -> object:
            [result] = await served.step([StepRequest(trajectory, action, number, finish)], timeout_seconds=60)
            return result.fault.kind.value if result.fault else result.observation

        made = edit(command="create", path="a.txt", file_text="from the editor\n")
        assert "has been created" in str(await step("one", made, 0))
        assert "'from the editor\\n'" in str(await step("one", "<python>open('a.txt').read()</python>", 1))
        assert await step("two", "<python>open('a.txt')</python>", 0) == "overloaded"
        await step("one", "", 2, finish=True)
        assert "FileNotFoundError" in str(await step("two", "<python>open('a.txt')</python>", 0))
    finally:
        await served.close()
    assert set(pools._shared) == earlier


async def test_a_forked_trajectory_goes_on_with_the_same_python_files_and_edits() -> None:
    served = ToolSet(load_tools("ipython_code,str_replace_editor,bash_terminal", shared=TOGETHER | {"max_sessions": 3}))
    await served.start()
    try:

        async def step(trajectory: str, action: str, number: int) -> str:
            [result] = await served.step([StepRequest(trajectory, action, number)], timeout_seconds=60)
            assert result.fault is None, result.fault
            return result.observation

        async def refused(source: str, new: str) -> str:
            fault = (await served.fork(source, new, timeout_seconds=60)).fault
            assert fault is not None
            return f"{fault.kind.value} {fault.message}"

        await step("one", edit(command="create", path="a.txt", file_text="first\n"), 0)
        await step("one", edit(command="str_replace", path="a.txt", old_str="first", new_str="second"), 1)
        await step("one", "<python>x = [1]\n%who</python>", 2)
        assert (await served.fork("one", "two", timeout_seconds=60)).fault is None
        assert "[1, 2]" in await step("two", "<python>x.append(2); open('a.txt', 'a').write('two')\nx</python>", 3)
        assert "x" in await step("two", "<python>%who</python>", 4)
        assert "[1]" in await step("one", "<python>x</python>", 3)
        assert "1\tfirst" in await step("one", edit(command="undo_edit", path="a.txt"), 4)
        assert "second\\ntwo" in await step("two", "<python>open('a.txt').read()</python>", 5)
        assert "was changed since" in await step("two", edit(command="undo_edit", path="a.txt"), 6)

        verifier = Verification(files=pack_files({"test.sh": PackedFile(b"true")})).model_dump()
        request = StepRequest("two", "", 7, extra={VERIFY_FIELD: verifier})
        [answer] = await served.step([request], timeout_seconds=60)
        assert answer.fault is not None
        assert (answer.fault.kind.value, answer.fault.retryable) == ("bad_request", False)
        assert "finish the other trajectories first" in answer.fault.message

        assert (await served.fork("two", "three", timeout_seconds=60)).fault is None
        assert "overloaded" in await refused("three", "four")
        for trajectory in ("one", "two"):
            await served.step([StepRequest(trajectory, "", finish=True)], timeout_seconds=60)
        assert "[1, 2]" in await step("three", "<python>x</python>", 8)
        await step("three", "<bash>y=1</bash>", 9)
        assert "not_forkable a program that is running cannot be copied" in await refused("three", "four")
        assert served.trajectories() == ["three"]
    finally:
        await served.close()


def test_tools_with_other_limits_are_not_served_together() -> None:
    config = {"workers": 1}
    tools = load_tools("ipython_code,str_replace_editor", shared=config)
    with pytest.raises(ConfigError, match="max_memory_mb is 512 for ipython_code and 2048 for str_replace_editor"):
        ToolSet([type(tools[0])(max_memory_mb=512), tools[1]])
