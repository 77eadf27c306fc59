"""Against the real sandbox, beside the tool that runs Python."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from tests.servers.tools.actions import results, text
from verl_tool.servers.tools.base import Context, InvalidCall, ToolResult
from verl_tool.servers.tools.ipython_code import IPythonCodeTool
from verl_tool.servers.tools.str_replace_editor import StrReplaceEditorTool
from verl_tool.servers.tools.workspace.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

OPTIONS = {"workers": 1, "warm_modules": (), "max_disk_mb": 1}
Edit = Callable[..., Awaitable[ToolResult]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools() -> AsyncIterator[tuple[StrReplaceEditorTool, IPythonCodeTool]]:
    editor, python = StrReplaceEditorTool(**OPTIONS), IPythonCodeTool(**OPTIONS)
    await editor.start()
    await python.start()
    assert editor.sandbox is python.sandbox
    assert editor.state_group == python.state_group
    yield editor, python
    await editor.close()
    await python.close()


@pytest_asyncio.fixture(loop_scope="module")
async def workspace(tools: tuple[StrReplaceEditorTool, IPythonCodeTool]) -> AsyncIterator[Workspace]:
    made = await tools[0].new_state(Context("t", 0, None))
    yield made
    await tools[0].close_state(made)


@pytest.fixture
def edit(tools: tuple[StrReplaceEditorTool, IPythonCodeTool], workspace: Workspace) -> Edit:
    async def run(command: str, path: str = "a.txt", **arguments: object) -> ToolResult:
        call = {"name": "str_replace_editor", "arguments": {"command": command, "path": path, **arguments}}
        [result] = await results(tools[0], f"<tool_call>{json.dumps(call)}</tool_call>", None, workspace)
        return result

    return run


@pytest.fixture
def python(
    tools: tuple[StrReplaceEditorTool, IPythonCodeTool], workspace: Workspace
) -> Callable[[str], Awaitable[str]]:
    return lambda code: text(tools[1], f"<python>{code}</python>", state=workspace)


async def test_every_example_action_is_answered(
    tools: tuple[StrReplaceEditorTool, IPythonCodeTool], workspace: Workspace
) -> None:
    create, view = StrReplaceEditorTool.example_actions
    assert await text(tools[0], create, state=workspace) == "The file a.txt has been created."
    assert (await text(tools[0], view, state=workspace)).endswith("\na.txt")


async def test_a_file_is_made_seen_changed_and_changed_back(
    edit: Edit, python: Callable[[str], Awaitable[str]]
) -> None:
    assert not (await edit("create", "pkg/a.py", file_text="x = 1\ny = 2\n")).error
    assert (await edit("view", "/box/work/pkg/a.py")).text == "     1\tx = 1\n     2\ty = 2"
    assert (await edit("view", "pkg/a.py", view_range="[2, -1]")).text == "     2\ty = 2"
    assert "     2\ty = 3" in (await edit("str_replace", "pkg/a.py", old_str="y = 2", new_str="y = 3")).text
    assert "     3\tz = 4" in (await edit("insert", "pkg/a.py", insert_line=2, new_str="z = 4")).text
    assert await python("import pkg.a\npkg.a.x, pkg.a.y, pkg.a.z") == "(1, 3, 4)"
    assert "     2\ty = 3" in (await edit("undo_edit", "pkg/a.py")).text
    await edit("undo_edit", "pkg/a.py")
    assert (await edit("view", "pkg/a.py")).text.endswith("y = 2")
    assert "is removed" in (await edit("undo_edit", "pkg/a.py")).text
    assert (await edit("view", "pkg/a.py")).text == "pkg/a.py does not exist"
    assert (await edit("undo_edit", "pkg/a.py")).error


async def test_a_text_that_is_absent_or_not_unique(edit: Edit) -> None:
    await edit("create", file_text="a\nb\na\n")
    absent = await edit("str_replace", old_str="c", new_str="d")
    assert absent.text == "No replacement was performed, old_str `c` did not appear verbatim in a.txt."
    assert absent.error
    assert "in lines [1, 3]" in (await edit("str_replace", old_str="a", new_str="d")).text
    assert (await edit("view")).text == "     1\ta\n     2\tb\n     3\ta"


async def test_what_another_tool_changed_is_not_lost_by_an_undo(
    edit: Edit, python: Callable[[str], Awaitable[str]]
) -> None:
    await edit("create", file_text="a\n")
    await python("open('a.txt', 'a').write('more')")
    assert "was changed since its last edit" in (await edit("undo_edit")).text


async def test_folders(edit: Edit, python: Callable[[str], Awaitable[str]]) -> None:
    await python("import os\nos.makedirs('d/e/f'); open('d/e/g', 'w'); open('d/.hid', 'w'); open('d/a\\nb', 'w')")
    assert (await edit("view", "d")).text.splitlines()[1:] == ["a", "b", "e/", "e/f/", "e/g"]
    assert "d/" in (await edit("view", ".")).text.splitlines()
    assert (await edit("str_replace", "d", old_str="a")).text == "d is a folder; only view takes folders"
    with pytest.raises(InvalidCall, match="the path is a folder"):
        await edit("view", "d", view_range=[1, 2])


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../../etc/passwd", "link", "folder/passwd", "/proc/1/environ", "fifo", "/", "a\0b"]
)
async def test_paths_that_lead_elsewhere(path: str, edit: Edit, python: Callable[[str], Awaitable[str]]) -> None:
    await python("import os\nos.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'folder'); os.mkfifo('fifo')")
    for result in (
        await edit("view", path),
        await edit("create", path, file_text="x"),
        await edit("str_replace", path, old_str="root", new_str="x"),
    ):
        assert result.error
        assert "root:" not in result.text


async def test_files_that_are_no_text(edit: Edit, python: Callable[[str], Awaitable[str]]) -> None:
    await python("open('latin', 'wb').write(b'caf\\xe9\\nx'); open('binary', 'wb').write(b'\\0')")
    assert (await edit("view", "latin")).text == "     1\tcaf\ufffd\n     2\tx"
    await edit("str_replace", "latin", old_str="x", new_str="y")
    assert await python("open('latin', 'rb').read()") == "b'caf\\xe9\\ny'"
    assert "binary file" in (await edit("view", "binary")).text


async def test_a_full_disk_leaves_the_file_as_it_was(edit: Edit, python: Callable[[str], Awaitable[str]]) -> None:
    await edit("create", file_text="a\n")
    await python("open('big', 'wb').write(bytes(1 << 20))")
    assert "No space left" in (await edit("str_replace", old_str="a", new_str="b" * 500_000)).text
    assert (await edit("view")).text == "     1\ta"
    assert (await edit("create", "new.txt", file_text="b" * 500_000)).error
    assert (await edit("view", "new.txt")).text == "new.txt does not exist"


async def test_long_views_lose_their_middle(edit: Edit) -> None:
    await edit("create", file_text="line\n" * 20_000)
    shown = (await edit("view")).text
    assert len(shown) < 17_000
    assert shown.endswith("20000\tline")


async def test_wrong_arguments(edit: Edit) -> None:
    assert "which is no character" in (await edit("create", file_text="\ud800")).text
    for command, arguments, told in [
        ("copy", {}, "command"),
        ("create", {}, "file_text is required"),
        ("view", {"view_range": [1]}, "two numbers"),
        ("view", {"view_range": [3, 2]}, "1 <= first"),
        ("view", {"view_range": "many"}, "view_range"),
        ("insert", {"insert_line": 0}, "new_str is required"),
    ]:
        await edit("create", "b.txt", file_text="a\n")
        with pytest.raises(InvalidCall, match=told):
            await edit(command, "c.txt" if command == "create" else "b.txt", **arguments)
