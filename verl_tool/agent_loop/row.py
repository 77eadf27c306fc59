"""Read the columns of a data set's row that the loop uses, and reject unsupported media."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl_tool.content.packed_files import unpack
from verl_tool.errors import ConfigError
from verl_tool.protocol import ENVIRONMENT_FIELD, FILES_FIELD, TOOLS_FIELD, WORKSPACE_LIMITS_FIELD
from verl_tool.util.json_text import as_object
from verl_tool.workspace_limits import NO_LIMITS, WorkspaceLimits

MEDIA_COLUMNS = ("images", "videos", "audios", "image", "video", "audio", "multi_modal_data")
"""Columns of verl's rows, and fields of messages, with content other than text."""
REWARD_COLUMNS = ("data_source", "reward_model")
"""Columns that reward managers read."""
VALIDATION = "verl_tool_validation"
"""Column that our trainers add to validation rows. Its value is true."""


def uses_tools(value: object, where: str) -> bool:
    """Read the column ``use_tool`` of a row. A missing value (None, or NaN as pandas fills gaps) means true.

    Raises ConfigError if the value is neither true nor false. `where` names the row in the message.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    plain = value.item() if hasattr(value, "item") else value  # numpy's scalars
    if isinstance(plain, bool) or plain in (0, 1):
        return bool(plain)
    raise ConfigError(f"{where}: use_tool is {value!r}; write true or false, or leave the column out (true)")


def row_turns(value: object, where: str, column: str = "max_turns") -> int | None:
    """Read the column ``max_turns`` or ``min_turns`` of a row. Returns None if it is missing (None, NaN).

    Raises ConfigError if the value is not a whole number from 0. `where` names the row in the message.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or not isinstance(plain, int | float) or plain < 0 or plain % 1 != 0:
        raise ConfigError(f"{where}: {column} is {value!r}; write a whole number from 0, or leave the column out")
    return int(plain)


def listed_tools(tools_kwargs: object, extra_info: object, where: str) -> tuple[str, ...] | None:
    """Return the only tools that a row's trajectory may use, or None for all tools. They are in ``tools_kwargs.tools``
    or, as in verl's agent loop, in ``extra_info.tool_selection``, where an empty list means all tools.

    Raises ConfigError if the value is not a list of names. `where` names the row in the message.
    """
    own = _names(tools_kwargs, "tools_kwargs.tools", where)
    selected = _names(extra_info, "extra_info.tool_selection", where) or None
    if None not in (own, selected) and own != selected:
        raise ConfigError(
            f"{where}: tools_kwargs.tools={list(own or ())} and extra_info.tool_selection={list(selected or ())} are "
            "one setting under two names; give just one of them"
        )
    return selected if own is None else own


def build_call_extra(
    tools_kwargs: Mapping[str, Any] | None, listed: Sequence[str] | None, where: str
) -> dict[str, Any]:
    """Return the extra data that a row's trajectory sends with its calls: its ``tools_kwargs`` and the `listed` tools.

    `SENT_ONCE` names those that are sent with the first call only. Raises ConfigError if files cannot be unpacked, the
    environment is no object (``{}`` or JSON of one), or limits are none. `where` names the row in the message.
    """
    extra = {name: value for name, value in (tools_kwargs or {}).items() if name != "tools"}
    if (arguments := extra.pop(ENVIRONMENT_FIELD, None)) is not None:
        extra[ENVIRONMENT_FIELD] = _read_object(arguments, f"{where}: tools_kwargs.{ENVIRONMENT_FIELD}")
    limits = WorkspaceLimits.parse(
        extra.pop(WORKSPACE_LIMITS_FIELD, None), f"{where}: tools_kwargs.{WORKSPACE_LIMITS_FIELD}"
    )
    if limits != NO_LIMITS:
        extra[WORKSPACE_LIMITS_FIELD] = limits.model_dump(mode="json", exclude_none=True)
    files = extra.pop(FILES_FIELD, None)
    if is_present(files):
        try:
            unpack(files)
        except ConfigError as error:
            raise ConfigError(f"{where}: tools_kwargs.{FILES_FIELD}: {error}") from None
        extra[FILES_FIELD] = files.tolist() if hasattr(files, "tolist") else files
    return extra if listed is None else {**extra, TOOLS_FIELD: list(listed)}


def _read_object(value: object, where: str) -> dict[str, Any]:
    content = as_object(value)
    if content is None:
        raise ConfigError(f"{where} is {value!r:.80}; write an object, or one as JSON")
    return content


def _names(group: object, name: str, where: str) -> tuple[str, ...] | None:
    value = group.get(name.rpartition(".")[2]) if isinstance(group, Mapping) else None
    if value is None:
        return None
    names = value.tolist() if hasattr(value, "tolist") else value  # numpy's arrays, as pandas reads parquet
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        raise ConfigError(f"{where}: {name} is {value!r:.200}; write a list of names of tools, or leave it out (all)")
    return tuple(names)


def reject_media(row: Mapping[str, Any], where: str, columns: Sequence[str] = MEDIA_COLUMNS, why: str = "") -> None:
    """Raise ConfigError that names the row and the column if one of `columns` has content. `why` gives the reason."""
    for column in columns:
        if is_present(row.get(column)):
            raise ConfigError(
                f"{where} has content in {column!r}, which is not carried{why and f' ({why})'}: the model would be "
                "trained or scored on the words around it. Leave such rows out"
            )


def is_present(value: object) -> bool:
    """Return whether a column has content: not None, and not an empty list, mapping or string."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    if isinstance(value, Mapping):
        return any(is_present(item) for item in value.values())
    return len(value) > 0 if hasattr(value, "__len__") else True


def text_messages(messages: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the conversation with the content of each message as one text; parts of text are joined.

    Raises ConfigError that names the row, the message and the part if a part is not text.
    """
    if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
        raise ConfigError(f"{where}: the prompt is not a list of messages with 'role' and 'content'")
    texts = []
    for i, message in enumerate(messages):
        reject_media(message, f"{where}, message {i}")
        texts.append({**message, "content": _text(message.get("content"), f"{where}, message {i}")})
    return texts


def _text(content: object, where: str) -> object:
    if content is None or isinstance(content, str):
        return content
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, Sequence) and not hasattr(parts, "tolist"):  # numpy's arrays, as parquet gives them
        raise ConfigError(f"{where}: the content is a {type(content).__name__}; it must be text")
    texts = []
    for part in list(parts):  # type: ignore[call-overload]
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(text, str):
            raise ConfigError(
                f"{where} contains a part of type {kind!r}, and this loop carries text only; leave such rows out"
            )
        texts.append(text)
    return "".join(texts)
