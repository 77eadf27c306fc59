"""``python -m verl_tool.servers.tests.test_str_replace_editor_tool str_replace_editor --url=…/get_observation``"""

from __future__ import annotations

from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, call, command_line, one_by_one


def _edit(text: str, command: str, **arguments: object) -> LiveTurn:
    """A command, and a text that its answer contains."""
    return LiveTurn(call("str_replace_editor", command=command, **arguments), (text,), valid=None)


_CREATE = _edit("created", "create", path="a.txt", file_text="one\ntwo\ntwo\n")
_EDITS = [
    _CREATE,
    _edit("     2\ttwo", "view", path="a.txt", view_range="[1, 2]"),
    _edit("     1\t1", "str_replace", path="a.txt", old_str="one", new_str="1"),
    _edit("     4\tfour", "insert", path="a.txt", insert_line=3, new_str="four"),
    _edit("     3\ttwo", "undo_edit", path="a.txt"),
    _edit("a.txt", "view", path="."),
]
_ERRORS = [
    _CREATE,
    _edit("did not appear verbatim", "str_replace", path="a.txt", old_str="x", new_str="y"),
    _edit("`two` in lines [2, 3]", "str_replace", path="a.txt", old_str="two", new_str="y"),
    _edit("does not exist", "view", path="b.txt"),
    _edit("does not exist", "undo_edit", path="b.txt"),
    _edit("path", "view"),
]
_ELSEWHERE = [
    _edit("not a file in the session's folder", "view", path=path)
    for path in ("/etc/passwd", "../../etc/passwd", "/proc/self/environ")
]

CASES = (
    LiveCase("create, view, str_replace, insert, undo_edit", one_by_one(_EDITS)),
    LiveCase("errors tell what is wrong", one_by_one(_ERRORS)),
    LiveCase("hostile: files outside of the workspace", one_by_one(*_ELSEWHERE)),
)

app = command_line(__name__, "str_replace_editor", "str_replace_editor", CASES)
