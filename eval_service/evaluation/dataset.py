"""Problems from a file of verl's rows."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_tool.agent_loop.prompt.conversation import IMAGES_COLUMN, OTHER_MEDIA, read_conversation
from verl_tool.agent_loop.row import build_call_extra, listed_tools, reject_media, row_turns, uses_tools
from verl_tool.checks.row_files import RowFile
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ConfigError
from verl_tool.protocol import ENVIRONMENT_FIELD, FILES_FIELD, WORKSPACE_IMAGE_FIELD, WORKSPACE_LIMITS_FIELD
from verl_tool.verification import AnyVerification, verification_of


@dataclass(frozen=True)
class Problem:
    """One row. What is sent to the endpoint is `messages` with `images`, `use_tool`, `tools_kwargs`, `tools`,
    `max_turns`, `min_turns` and `verification`."""

    index: int
    messages: tuple[dict[str, Any], ...]
    """The content of one with images is a list of parts, as `Conversation.messages`."""
    data_source: str
    reward_model: Mapping[str, Any]
    """``ground_truth`` and ``style``."""
    images: tuple[ImagePart, ...] = ()
    """Those of the messages, in the order of their places."""
    ability: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    use_tool: bool = True
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Sent to the tools with every call."""
    tools: tuple[str, ...] | None = None
    """The only tools that may be used; None: all."""
    max_turns: int | None = None
    """Most tool turns; None: as the endpoint has it."""
    min_turns: int | None = None
    verification: AnyVerification | None = None
    """Run in the workspace that the answer leaves, or sent to the environment; None: the answer is graded from what is
    written."""

    @property
    def digest(self) -> str:
        """Changes with the question, its images, files, container, tools and turns, and the right answer."""
        files = self.tools_kwargs.get(FILES_FIELD)
        images = [image.sha256 for image in self.images] or None
        image = self.tools_kwargs.get(WORKSPACE_IMAGE_FIELD)
        environment, limits = (self.tools_kwargs.get(name) for name in (ENVIRONMENT_FIELD, WORKSPACE_LIMITS_FIELD))
        parts = (self.tools, self.max_turns, files, images, image, self.min_turns, environment, limits)
        own = [value for value in parts if value is not None]
        text = json.dumps([self.messages, self.reward_model, *own], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """The first `limit` rows of a ``.parquet`` or ``.jsonl`` file. Raises ConfigError that names a wrong row."""
    problems: list[Problem] = []
    problems = [_problem(row, index, path) for index, row in enumerate(itertools.islice(_rows(path), limit))]
    if not problems:
        raise ConfigError(f"{path} holds no rows")
    return problems


def _problem(row: Mapping[str, Any], index: int, path: Path) -> Problem:
    missing = [name for name in ("prompt", "reward_model") if not row.get(name)]
    if missing:
        raise ConfigError(
            f"row {index} of {path} lacks {missing[0]!r}; rows are verl's, as examples/data_preprocess makes"
        )
    where = f"row {index} of {path}"
    reject_media(row, where, OTHER_MEDIA)
    conversation = read_conversation(row["prompt"], row.get(IMAGES_COLUMN), where)
    extra_info = dict(row.get("extra_info") or {})
    tools_kwargs = extra_info.get("tools_kwargs")
    listed = listed_tools(tools_kwargs, extra_info, where)
    extra = build_call_extra(tools_kwargs, None, where)
    return Problem(
        index=index,
        messages=tuple({k: v for k, v in message.items() if v is not None} for message in conversation.messages),
        images=conversation.images,
        data_source=str(row.get("data_source") or ""),
        reward_model=dict(row["reward_model"]),
        ability=str(row.get("ability") or ""),
        extra_info=extra_info,
        use_tool=uses_tools(row.get("use_tool"), where),
        tools_kwargs=extra,
        verification=verification_of(row["reward_model"], where, in_environment=ENVIRONMENT_FIELD in extra),
        tools=listed,
        max_turns=row_turns(row.get("max_turns"), where),
        min_turns=row_turns(row.get("min_turns"), where, "min_turns"),
    )


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give a .parquet or .jsonl file of verl's rows")
    if path.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"{path} ends in {path.suffix!r}; give a .parquet or .jsonl file")
    return RowFile(path).rows()
