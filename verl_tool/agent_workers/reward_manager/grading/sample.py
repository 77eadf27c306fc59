"""Input of a reward manager: a trajectory, and the ground truth of its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory, as_trajectory
from verl_tool.errors import ConfigError


class Decoder(Protocol):
    """The part of a tokenizer that grading needs."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True)
class Sample:
    """A trajectory to grade. `turns` and `text` contain nothing that a tool or the chat template wrote."""

    data_source: str
    ground_truth: Any
    turns: tuple[str, ...]
    """The model's text of each turn, without special tokens."""
    trajectory: Trajectory
    ability: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The row's ``extra_info``, which never leaves the trainer."""

    @property
    def text(self) -> str:
        return "\n".join(self.turns)

    @property
    def answer(self) -> str:
        """The model's last turn."""
        return self.turns[-1] if self.turns else ""


def sample_of(row: Mapping[str, Any], tensors: Mapping[str, Any], tokenizer: Decoder) -> Sample:
    """Make the sample of one row of verl's batch.

    `row` is the non-tensor part, whose ``tool_extra_fields["trajectory"]`` is the `Trajectory`, or its JSON from
    another loop. `tensors` are ``responses``, ``attention_mask`` and possibly ``response_mask``, each [length]. Without
    a trajectory, the response mask says which tokens the model wrote. Without both, the model wrote a single turn.

    Raises ConfigError if there are several turns and nothing says which tokens the model wrote.
    """
    record = (row.get("tool_extra_fields") or row).get("trajectory") or _without_record(row, tensors)
    trajectory = as_trajectory(record)
    written = (segment.tokens for segment in trajectory.response if segment.is_turn)
    return Sample(
        data_source=str(row["data_source"]),
        ground_truth=row["reward_model"]["ground_truth"],
        turns=tuple(tokenizer.decode(list(tokens), skip_special_tokens=True) for tokens in written),
        trajectory=trajectory,
        ability=str(row.get("ability") or ""),
        extra_info=dict(row.get("extra_info") or {}),
    )


def _without_record(row: Mapping[str, Any], tensors: Mapping[str, Any]) -> Trajectory:
    ids = tensors["responses"].tolist()
    length = int(tensors["attention_mask"][-len(ids) :].sum())
    if "response_mask" in tensors:
        mask = tensors["response_mask"].tolist()
    elif int(row.get("__num_turns__") or 2) <= 2:
        mask = [1] * len(ids)
    else:
        raise ConfigError(
            f"a trajectory of {row['__num_turns__']} turns came without its record, so nothing tells the model's text "
            "from the tools'; put Trajectory.to_json() into extra_fields['trajectory']"
        )
    return Trajectory("", (Segment(Author.PROMPT, ()), *_segments(ids[:length], mask)), StopReason.ANSWERED)


def _segments(ids: Sequence[int], mask: Sequence[int]) -> list[Segment]:
    """Divide the tokens by author: the model where the mask is 1, and a tool elsewhere."""
    segments: list[Segment] = []
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or mask[i] != mask[start]:
            author = Author.MODEL if mask[start] else Author.TOOL
            segments.append(Segment(author, tuple(ids[start:i])))
            start = i
    return segments
