"""The rows of a file as tasks: what a policy reads, what its calls bring along, and how it is graded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from verl_tool.agent_loop.row import build_call_extra, listed_tools, reject_media, text_messages, uses_tools
from verl_tool.agent_workers.reward_manager.grading.cli_inputs import read_raw_rows
from verl_tool.agent_workers.reward_manager.grading.manager_process import UnusableError
from verl_tool.errors import ConfigError
from verl_tool.protocol import ENVIRONMENT_FIELD
from verl_tool.util.json_text import encode_json
from verl_tool.verification import Verification, verification_of

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class TaskRow:
    """One row. Only `messages` and the tools reach the policy."""

    index: int
    messages: list[dict[str, Any]]
    call_extra: dict[str, Any]
    """What is sent with the calls, as `build_call_extra` gives it."""
    listed: tuple[str, ...] | None
    """Tools that the row may use; None: all."""
    ground_truth: Any
    verification: Verification | None
    """Of a row that is verified in its workspace; None: a reward manager grades it."""
    content: Mapping[str, Any] = field(repr=False)
    """All other columns, for the reward manager."""


class TaskRows:
    """The rows of a file, all of which can be served."""

    def __init__(self, path: Path) -> None:
        """Read a ``.parquet`` or ``.jsonl`` file with verl's columns. Raises ConfigError that names the row."""
        try:
            raw = [_plain(row) for row in read_raw_rows(path)]
        except UnusableError as error:
            raise ConfigError(str(error)) from None
        self.rows = [_read_row(row, index, f"{path}, row {index}") for index, row in enumerate(raw)]
        self.digest = sha256(encode_json(raw)).hexdigest()[:16]
        """Tells these rows from those of another file."""
        stem = path.stem.lower()
        self.split = "validation" if stem.startswith("val") else next((s for s in SPLITS if s in stem), "train")

    def __len__(self) -> int:
        return len(self.rows)


def _read_row(row: Mapping[str, Any], index: int, where: str) -> TaskRow:
    """Raises ConfigError that begins with `where`."""
    fields = dict(row)
    prompt, extra_info = fields.pop("prompt", None), fields.get("extra_info")
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(f"{where}: prompt is {prompt!r:.80}; it must be a list of messages")
    reject_media(fields, where, why="these protocols carry text")
    tools_kwargs = extra_info.get("tools_kwargs") if isinstance(extra_info, Mapping) else None
    with_tools = uses_tools(fields.get("use_tool"), where)
    listed = listed_tools(tools_kwargs, extra_info, where) if with_tools else ()
    call_extra = build_call_extra(tools_kwargs, listed, where)
    if ENVIRONMENT_FIELD in call_extra:
        raise ConfigError(f"{where} begins in an environment, which is not served on; serve rows that call tools")
    reward_model = fields.pop("reward_model", None)
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise ConfigError(f"{where}: reward_model is {reward_model!r:.80}; it must have a ground_truth")
    verification = verification_of(reward_model, where)
    return TaskRow(
        index,
        text_messages(prompt, where),
        call_extra,
        listed,
        reward_model["ground_truth"],
        verification if isinstance(verification, Verification) else None,
        fields,
    )


def _plain(value: Any) -> Any:
    """`value` with lists and Python's numbers in place of numpy's, as pandas reads parquet."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
