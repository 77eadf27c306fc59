"""``python -m verl_tool.servers.tests.test_str_replace_editor_tool str_replace_editor --url=…/get_observation``"""

from __future__ import annotations

import json

from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe, command_line


async def _turns(probe: Probe, *turns: tuple[dict[str, object], str]) -> None:
    """Commands of one trajectory, each with a text that its answer holds."""
    trajectory = probe.new_id()
    for step, (arguments, expected) in enumerate(turns):
        call = json.dumps({"name": "str_replace_editor", "arguments": arguments})
        result = await probe.answer(f"<tool_call>{call}</tool_call>", trajectory_id=trajectory, step=step)
        if expected not in result.observation:
            raise CheckFailed(f"{expected!r} is missing in the answer {result.observation!r:.300} to {call:.100}")
    await probe.client.finish([trajectory])


async def _edits(probe: Probe) -> None:
    await _turns(
        probe,
        ({"command": "create", "path": "a.txt", "file_text": "one\ntwo\ntwo\n"}, "created"),
        ({"command": "view", "path": "a.txt", "view_range": "[1, 2]"}, "     2\ttwo"),
        ({"command": "str_replace", "path": "a.txt", "old_str": "one", "new_str": "1"}, "     1\t1"),
        ({"command": "insert", "path": "a.txt", "insert_line": 3, "new_str": "four"}, "     4\tfour"),
        ({"command": "undo_edit", "path": "a.txt"}, "     3\ttwo"),
        ({"command": "view", "path": "."}, "a.txt"),
    )


async def _errors(probe: Probe) -> None:
    await _turns(
        probe,
        ({"command": "create", "path": "a.txt", "file_text": "one\ntwo\ntwo\n"}, "created"),
        (
            {"command": "str_replace", "path": "a.txt", "old_str": "x", "new_str": "y"},
            "did not appear verbatim",
        ),
        ({"command": "str_replace", "path": "a.txt", "old_str": "two", "new_str": "y"}, "`two` in lines [2, 3]"),
        ({"command": "view", "path": "b.txt"}, "does not exist"),
        ({"command": "undo_edit", "path": "b.txt"}, "does not exist"),
        ({"command": "view"}, "path"),
    )


async def _elsewhere(probe: Probe) -> None:
    paths = ("/etc/passwd", "../../etc/passwd", "/proc/self/environ")
    for path in paths:
        await _turns(probe, ({"command": "view", "path": path}, "not a file in the session's folder"))


CASES = (
    LiveCase("create, view, str_replace, insert, undo_edit", _edits),
    LiveCase("errors tell what is wrong", _errors),
    LiveCase("hostile: files outside of the workspace", _elsewhere),
)

app = command_line("str_replace_editor", "str_replace_editor", CASES, "Check the editor of a live server.")

if __name__ == "__main__":
    app()
