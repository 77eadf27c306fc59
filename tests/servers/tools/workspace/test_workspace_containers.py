"""The tools with a workspace, where that is a container (the stand-in for docker)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from containers import stand_in
from toy_tools import until

from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.errors import ConfigError, SandboxError, ToolFault
from verl_tool.protocol import FILES_FIELD, FaultKind, StepRequest
from verl_tool.sandbox import SessionLimits
from verl_tool.sandbox.backends import Container, ContainerSettings
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.workspace.workspace import Workspace
from verl_tool.verification import Verification

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TOOLS = "ipython_code,bash_terminal,str_replace_editor"
OPTIONS = {"backend": "docker", "image": "any", "max_sessions": 2, "timeout_seconds": 20, "workers": 1}


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ToolSet]:
    stand_in(tmp_path, monkeypatch)
    served = ToolSet(load_tools(TOOLS, shared=OPTIONS))
    await served.start()
    yield served
    await served.close()
    assert os.listdir(tmp_path / "containers") == []


async def step(served: ToolSet, trajectory: str, action: str, finish: bool = False) -> str:
    [result] = await served.step([StepRequest(trajectory, action, finish=finish)], timeout_seconds=60)
    return result.fault.kind.value if result.fault else result.observation


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_the_tools_share_the_container_of_their_trajectory(served: ToolSet, tmp_path: Path) -> None:
    editor = "str_replace_editor"
    assert "has been created" in await step(
        served, "a", call(editor, command="create", path="d/a.txt", file_text="one\n")
    )
    assert "'one\\n'" in await step(served, "a", "<python>x = open('d/a.txt').read()\nx</python>")
    assert "ONE" in await step(served, "a", "<bash>cd d; y=1; tr a-z A-Z < a.txt</bash>")
    assert "1 /box/work/d" in await step(served, "a", "<bash>echo $y $PWD</bash>")
    edited = await step(served, "a", call(editor, command="str_replace", path="d/a.txt", old_str="one", new_str="two"))
    assert "1\ttwo" in edited
    assert "did not appear verbatim" in await step(
        served, "a", call(editor, command="str_replace", path="d/a.txt", old_str="one", new_str="x")
    )
    assert "d/a.txt" in await step(served, "a", call(editor, command="view", path="."))
    assert "does not exist" in await step(served, "a", call(editor, command="view", path="nowhere"))
    assert "1\tone" in await step(served, "a", call(editor, command="undo_edit", path="d/a.txt"))
    assert "one" in await step(served, "a", "<python>!cat d/a.txt</python>")
    for path, words in (("a\0b", "Invalid argument"), ("a" * 200_000, "too long"), ("a" * 5000, "too long")):
        assert words in await step(served, "a", call(editor, command="view", path=path))
    assert len(os.listdir(tmp_path / "containers")) == 1
    fault = (await served.fork("a", "c", timeout_seconds=60)).fault
    assert fault is not None
    assert fault.kind.value == "not_forkable"
    assert "FileNotFoundError" in await step(served, "b", "<python>open('d/a.txt')</python>")
    assert await step(served, "c", "<python>1</python>") == "overloaded"
    await step(served, "a", "", finish=True)
    assert len(os.listdir(tmp_path / "containers")) == 1


async def test_a_shell_in_a_container_is_interrupted_and_takes_keys(served: ToolSet) -> None:
    await step(served, "a", "<bash>z=kept</bash>")
    late = await step(served, "a", call("bash", command="sleep 100", seconds=0.5))
    assert "was interrupted" in late
    assert "kept" in await step(served, "a", "<bash>echo $z</bash>")
    assert "Exit code: 3" in await step(served, "a", "<bash>(exit 3)</bash>")
    assert "takes keys" in await step(served, "a", call("bash", keys=["cat", "Enter", "said", "Enter"], seconds=3))
    assert "runs in the foreground" in await step(served, "a", "<bash>echo no</bash>")
    await step(served, "a", call("bash", keys=["C-c"], seconds=3))
    for _ in range(20):  # until the shell has noticed that its program is gone
        if "runs in the foreground" not in (shown := await step(served, "a", "<bash>echo $z</bash>")):
            break
        await asyncio.sleep(0.5)
    assert "kept" in shown
    assert "a new one has started" in await step(served, "a", "<bash>exit 4</bash>")
    assert "kept" not in await step(served, "a", "<bash>echo $z</bash>")


async def test_files_of_a_row_are_there_and_a_verifier_is_refused(served: ToolSet) -> None:
    files = pack_files({"in/run.sh": PackedFile(b"#!/bin/sh\necho ran\n", executable=True)})
    request = StepRequest("a", "<bash>in/run.sh</bash>", extra={FILES_FIELD: files})
    [result] = await served.step([request], timeout_seconds=60)
    assert "ran" in result.observation
    workspace = Workspace(Container(ContainerSettings("docker", "any"), SessionLimits()))
    with pytest.raises(ToolFault, match="a verifier runs in a session of the sandbox only") as caught:
        await workspace.verify(Verification(files=pack_files({"test.sh": PackedFile(b"true")})))
    assert caught.value.kind is FaultKind.MISCONFIGURED


async def test_a_container_that_ends_is_a_lost_state(served: ToolSet, tmp_path: Path) -> None:
    await step(served, "a", "<python>x = 1</python>")
    [name] = os.listdir(tmp_path / "containers")
    os.system(f"docker rm --force {name}")  # noqa: ASYNC221
    await until(lambda: not os.listdir(tmp_path / "containers"))
    assert await step(served, "a", "<python>x</python>") == "state_lost"


async def test_options_without_effect_and_images_that_are_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, words in (
        ({"image": "debian:12"}, "image has no effect with backend='sandbox'"),
        ({"backend": "docker"}, "backend='docker' needs image"),
        ({"backend": "podman", "image": "x", "allowed_modules": ["math"]}, "allowed_modules has no effect"),
        ({"backend": "lxc"}, "backend is 'lxc'"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_tools("ipython_code", shared=options)
    stand_in(tmp_path, monkeypatch)
    with pytest.raises(SandboxError, match="Unable to find image 'missing"):
        await ToolSet(load_tools(TOOLS, shared={**OPTIONS, "image": "missing"})).start()
