"""Looks at the files of a workspace and edits them: ``view``, ``create``, ``str_replace``, ``insert``, ``undo_edit``.

The arguments are those of Anthropic's text editor tool, with which many models were trained. A path may be relative to
the workspace's folder; only that folder and /tmp can be read or written, and links are not followed.
"""

from __future__ import annotations

import errno
import json
import posixpath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from verl_tool.formats import Call
from verl_tool.sandbox.backends import Sandbox
from verl_tool.sandbox.inside import wire
from verl_tool.servers.tools._programs import cut_middle
from verl_tool.servers.tools.base import CallError, Context, InvalidCall, ToolResult
from verl_tool.servers.tools.workspace.edits import Edits, editor
from verl_tool.servers.tools.workspace.text_edits import EditError, Text, check_size, digest
from verl_tool.servers.tools.workspace.workspace import Workspace, WorkspaceOptions, WorkspaceTool

_FOLDERS = (wire.WORK_DIRECTORY, "/tmp", "/box/tmp")
_DEPTH = 2
_MAX_PATH = 4096
"""Characters; Linux takes no longer one."""


class EditorOptions(WorkspaceOptions):
    max_output_length: int = Field(default=16_000, ge=100)


def _read_json(value: Any) -> Any:
    """Models write a list as the text of its JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError:
        return value


class EditorArguments(BaseModel):
    command: Literal["view", "create", "str_replace", "insert", "undo_edit"]
    path: str = Field(min_length=1, description="a file or, for view, a folder")
    file_text: str | None = Field(default=None, description="create: the content of the new file")
    old_str: str | None = Field(default=None, description="str_replace: a text that stands in the file exactly once")
    new_str: str | None = Field(default=None, description="str_replace: what comes in its place; insert: the new lines")
    insert_line: int | None = Field(default=None, description="insert: the line behind which to put them; 0: the top")
    insert_text: str | None = Field(default=None, description="insert: the same as new_str")
    view_range: Annotated[list[int] | None, BeforeValidator(_read_json)] = Field(
        default=None, description="view: first and last line, from 1; -1 as the last: to the end"
    )


class StrReplaceEditorTool(WorkspaceTool):
    """Edits in the files of the trajectory's workspace."""

    name = "str_replace_editor"
    aliases = ("str_replace_based_edit_tool",)
    description = (
        "Views, creates and edits text files. Commands: view (a file with line numbers, or a folder), create, "
        "str_replace (old_str must stand in the file exactly once), insert, undo_edit."
    )
    Arguments = EditorArguments
    example_actions = (
        '<tool_call>\n{"name": "str_replace_editor", "arguments": {"command": "create", "path": "a.txt", '
        '"file_text": "one\\ntwo\\n"}}\n</tool_call>',
        '<str_replace_editor>{"command": "view", "path": "."}</str_replace_editor>',
    )
    Options = EditorOptions
    options: EditorOptions

    async def run(self, call: Call, context: Context) -> ToolResult:
        arguments: EditorArguments = self.arguments(call)
        if len(arguments.path) > _MAX_PATH:
            length = len(arguments.path)
            raise InvalidCall(f"path is too long: it has {length} characters, and at most {_MAX_PATH} can be")
        workspace: Workspace = context.state
        path = posixpath.normpath(posixpath.join(workspace.session.work_directory, arguments.path))
        try:
            return ToolResult(await self._done(arguments, path, workspace.session, workspace.part(Edits)))
        except (CallError, EditError) as error:
            return ToolResult(cut_middle(str(error), self.options.max_output_length), error=True)
        except OSError as error:
            return ToolResult(_describe(error, arguments.path), error=True)
        except UnicodeError:
            return ToolResult(f"{arguments.path!a} cannot be a path", error=True)

    async def _done(self, asked: EditorArguments, path: str, session: Sandbox, edits: Edits) -> str:
        """What the model reads. Raises CallError, EditError, OSError, InvalidCall."""
        if asked.command == "view":
            return await self._view(asked, path, session)
        if asked.command == "create":
            return await _create(asked, path, session, edits)
        content = check_size(await session.read_file(path), asked.path)
        if asked.command == "undo_edit":
            return await self._undo(asked, path, session, edits, content)
        changed, before, after, snippet = await self._edited(asked, content)
        await _write(session, path, changed, content)
        edits.add(path, before, after)
        return f"The file {asked.path} has been edited. Around the edit it reads now:\n{snippet}"

    async def _edited(self, asked: EditorArguments, content: bytes) -> tuple[bytes, bytes, bytes, str]:
        """As `text_edits.replace`. Raises CallError, InvalidCall."""
        if asked.command == "str_replace":
            old = _required(asked.old_str, "old_str", "str_replace")
            return await self._compute("replace", content, asked.path, old, asked.new_str or "")
        line = _required(asked.insert_line, "insert_line", "insert")
        new = asked.new_str if asked.insert_text is None else asked.insert_text
        return await self._compute("insert", content, asked.path, line, _required(new, "new_str", "insert"))

    async def _view(self, asked: EditorArguments, path: str, session: Sandbox) -> str:
        try:
            if path in _FOLDERS:
                raise IsADirectoryError
            content = check_size(await session.read_file(path), asked.path)
        except IsADirectoryError:
            if asked.view_range is not None:
                raise InvalidCall("view_range is for files, and the path is a folder") from None
            return cut_middle(await _listing(asked.path, path, session), self.options.max_output_length)
        return await self._compute("view", content, asked.path, asked.view_range)

    async def _undo(self, asked: EditorArguments, path: str, session: Sandbox, edits: Edits, content: bytes) -> str:
        edit = edits.last(path)
        before, text = await self._compute("undo", edit.before, edit.after, content, asked.path)
        if before is None:
            await _remove(session, path)
        else:
            await _write(session, path, before, content)
        edits.forget(edit)
        if before is None:
            return f"The file {asked.path} was made by the edit that is undone, and is removed."
        return f"The last edit of {asked.path} is undone. It reads now:\n{text}"

    async def _compute(self, name: str, *arguments: Any) -> Any:
        """As `Editor.run`, with the tool's limits."""
        options = self.options
        return await editor.run(name, *arguments, options.max_output_length, seconds=options.timeout_seconds)


async def _create(asked: EditorArguments, path: str, session: Sandbox, edits: Edits) -> str:
    content = Text(_required(asked.file_text, "file_text", "create")).encoded()
    try:
        await session.read_file(path)
    except FileNotFoundError:
        await _write(session, path, content, None)
        edits.add(path, None, digest(content))
        return f"The file {asked.path} has been created."
    raise CallError(f"{asked.path} exists already, and create overwrites nothing; use str_replace or insert")


async def _write(session: Sandbox, path: str, content: bytes, before: bytes | None) -> None:
    """Write a file, all or nothing as far as there is room. Raises OSError."""
    try:
        await session.write_file(path, content)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            if before is None:
                await _remove(session, path)
            else:
                await session.write_file(path, before)
        raise


async def _remove(session: Sandbox, path: str) -> None:
    await session.exec(["rm", "-f", "--", path])


async def _listing(shown: str, path: str, session: Sandbox) -> str:
    """A folder's content, hidden files left out."""
    hidden = ["-name", ".*", "-prune", "-o"]
    command = ["find", path, "-mindepth", "1", "-maxdepth", str(_DEPTH), *hidden, "-printf", "%y%P\\0"]
    result = await session.exec(command)
    if result.exit_code is None:
        raise CallError(f"{shown} could not be listed within the limit {result.limit_hit}")
    names = [f"{entry[1:]}{'/' if entry[0] == 'd' else ''}" for entry in result.stdout.split("\0") if entry]
    if not names and result.exit_code:
        raise CallError(result.stderr.strip())
    return "\n".join([f"{shown}, {_DEPTH} levels deep, without hidden files:", *sorted(names)])


def _required(value: Any, name: str, command: str) -> Any:
    if value is None:
        raise InvalidCall(f"the argument {name} is required for the command {command}")
    return value


def _describe(error: OSError, path: str) -> str:
    """What the model reads of a path that cannot be used."""
    links = (errno.ELOOP, errno.ENOTDIR)
    if error.errno in links:
        return f"{path} is or goes through a link, or something that is no folder; name the file itself"
    if isinstance(error, FileNotFoundError):
        return f"{path} does not exist"
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder; only view takes folders"
    return f"{path}: {error.strerror}"
