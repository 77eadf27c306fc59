"""The record of one trajectory: who wrote which tokens, which calls were made, what failed, how long it took.

Records are read and written as JSON lines, one trajectory per line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, with_config

from verl_tool.content.parts import ImagePart
from verl_tool.protocol import Fault
from verl_tool.util.atomic_files import atomic_write
from verl_tool.verification import Verdict

LOOP_FAULT = "excluded_from_group"
"""Column of a batch: whether the trajectory ended in a fault or was aborted."""
REWARD_FAULT = "reward_fault"
"""Key of ``reward_extra_info``: why there is no reward, or ``""``. The trainer must leave such a row out of the loss,
its group's baseline and the means of validation, like a trajectory whose tools failed."""
RAISES_ON_EMPTY = "it raises on an empty answer too"
"""Text in a `REWARD_FAULT` which says that the reward manager has a bug and fails on answers that it cannot read."""
POLICY_INDUCED = "reward_provoked"
"""Key of ``reward_extra_info``: how grading failed on this answer but not on an empty one, or ``""``. Such a row keeps
the score of an empty answer and stays in the loss: otherwise a policy could learn to crash the grader."""

ROW_REWARDS = "row_rewards"
"""Key of ``reward_extra_info``: a JSON list with the reward of each of `Trajectory.rows`. The rollout's reward includes
their sum."""
BONUS = "curiosity_bonus"
"""Key of a record's ``reward_extra_info``: the curiosity bonus that the trainer added to the reward."""
RECORD_PLACES = "record_places"
"""Column of verl's batch: where a row's pieces are in the record's response, as pairs of start and length in tokens."""
VERSIONS = "versions"
"""Key of a record's ``extra``: the oldest and newest weights that sampled it, as numbers of weight updates."""
GROUP = "group"
"""Key of a record's ``extra``: the line, from 0, of the step's first trajectory with the same prompt."""

_FROM_TRAINER = {"step", "validate", GROUP, VERSIONS, "reward_fault", "provoked", "reward_extra_info"}
"""Keys of a record's ``extra`` that the trainer adds."""


class Author(str, Enum):
    """The author of a segment's tokens."""

    PROMPT = "prompt"
    """The rendered row of the data set."""
    MODEL = "model"
    """The generator. Only these tokens have mask 1, except in an edited turn (`Segment.edited`)."""
    TOOL = "tool"
    """The tool server: the text of an observation."""
    TEMPLATE = "template"
    """The chat template (or `mtrl_sep`): tokens that close a turn and open the next."""


class StopReason(str, Enum):
    """Why a trajectory ended."""

    ANSWERED = "answered"
    """The model ended its turn without an action."""
    TOOL_DONE = "tool_done"
    """A tool, such as `finish`, ended the trajectory."""
    MAX_TURNS = "max_turns"
    """The trajectory made `max_turns` tool turns, and the model requested another or may write no more."""
    INVALID_CALLS = "invalid_calls"
    """`max_invalid_calls` calls in a row were invalid."""
    MAX_ACTION_LENGTH = "max_action_length"
    """The model's turn was cut at `max_action_length`."""
    MAX_RESPONSE_LENGTH = "max_response_length"
    """`max_response_length` or `max_model_len` was reached, or cut the model's turn."""
    FAULT = "fault"
    """Infrastructure failed; see `Trajectory.fault`."""
    ABORTED = "aborted"
    """The generator aborted the request because the engine stopped or changed its weights."""

    @property
    def finished(self) -> bool:
        """Whether the model or a tool ended the trajectory, and not a limit or a fault."""
        return self in (StopReason.ANSWERED, StopReason.TOOL_DONE)

    @property
    def overlong(self) -> bool:
        """Whether a limit of length or turns ended the trajectory."""
        return self in (StopReason.MAX_TURNS, StopReason.MAX_ACTION_LENGTH, StopReason.MAX_RESPONSE_LENGTH)


class Excluded(str, Enum):
    """Why a trajectory is left out of the loss and, for `FAULT`, `ABORTED` and `GRADER`, of its group's baseline."""

    FAULT = "fault"
    """Infrastructure failed, and the model's call cannot have caused it."""
    ABORTED = "aborted"
    GRADER = "grader"
    """There is no reward. Set by the trainer."""
    SINGLETON = "lone"
    """All others of its group, or its greedy baseline, are left out, so it has no baseline. Set by the trainer."""
    OVERLONG = "overlong"
    """`mask_overlong_loss`: a limit ended it."""
    VOID = "void"
    """`mask_void_traj`: no valid call and no final answer."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one author."""

    author: Author
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None
    """Log-probability of each token, in the model's segments only; None if the generator returned none."""
    text: str = ""
    """The tokens as text, for display; it is never encoded again. Empty if the tokens were not decoded."""
    image: str | None = None
    """SHA-256 of the image that the tokens represent. The segment holds the whole image and is never cut."""
    call_spans: tuple[tuple[int, int], ...] | None = None
    """Start and end of each call in `text`, in the model's segments only; None if the calls were not searched for."""
    edited: bool = False
    """Whether the segment replaces what `author` wrote in the trajectory that this one branches from."""
    row: int = 0
    """The training row of the tokens; see `Trajectory.contexts`."""
    summary: bool = False
    """Whether this is the model's summary of its context (``context=summarise``), which does not count as a turn."""
    agent: int = 0
    """The agent whose context contains the tokens: 0 for the main agent, k for the k-th sub-agent."""

    @property
    def generated(self) -> bool:
        """Whether the generator sampled the tokens."""
        return self.author is Author.MODEL and not self.edited

    @property
    def is_turn(self) -> bool:
        """Whether this is a turn of the main agent."""
        return self.author is Author.MODEL and not self.summary and not self.agent


DELEGATED = "delegate"
"""`RowContext.reason` of a sub-agent's first row."""


@dataclass(frozen=True)
class RowContext:
    """The prompt of a training row after the first: earlier tokens, or tokens of a template."""

    tokens: tuple[int, ...]
    reason: str
    """Why the row was started: a value of the option `context`, or `DELEGATED`."""
    images: tuple[tuple[int, int, str], ...] = ()
    """Images among the tokens, in order: start, number of tokens, SHA-256."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The tokens as a prompt."""
        segments, end = [], 0
        for start, length, image in self.images:
            if start > end:
                segments.append(Segment(Author.PROMPT, self.tokens[end:start]))
            end = start + length
            segments.append(Segment(Author.PROMPT, self.tokens[start:end], image=image))
        if end < len(self.tokens) or not segments:
            segments.append(Segment(Author.PROMPT, self.tokens[end:]))
        return tuple(segments)


@dataclass(frozen=True)
class ParsedCall:
    """One call that the loop found in an action."""

    name: str
    """Name of the tool, as the model wrote it."""
    arguments: str
    """A JSON object, as in OpenAI's ``tool_calls``. Free text (code, a query) is its only member ``input``."""
    start: int
    end: int
    """End of the call in the action's text; `start` is its start."""


@dataclass(frozen=True)
class CallRecord:
    """One call of the tool server."""

    step: int
    """Number of the call among those sent to the tool server, from 0. A `local` call has the number of the next one."""
    action: str
    observation: str = ""
    """The server's answer, before any truncation."""
    valid: bool = True
    done: bool = False
    reward: float | None = None
    invalid_reason: str | None = None
    fault: Fault | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    visible_tokens: int = 0
    """Number of the observation's tokens that the model was fed, without those of the template."""
    truncated: bool = False
    """Whether the model was fed less than `observation`."""
    seconds: float = 0.0
    names: tuple[str, ...] = ()
    """Names of the tools that the action calls, without duplicates; empty in records older than this field."""
    calls: tuple[ParsedCall, ...] | None = None
    """The calls in the action, in order; None in records older than this field (see `actions.calls_of`)."""
    agent: int = 0
    """The agent that made the call, as in `Segment.agent`."""
    local: bool = False
    """Whether the loop answered the call itself (``delegate``). `seconds` is then 0: the sub-agent's time is in the
    timings."""
    opens: bool = False
    """Whether the loop began the trajectory in an environment with it. The model did not write it."""
    over_mcp: bool = False
    """Whether an agent behind the gateway called the tool over MCP. The call then belongs to no turn of the model."""


@dataclass(frozen=True)
class Timings:
    """The time that a trajectory spent, in seconds."""

    generate: float = 0.0
    tools: float = 0.0
    total: float = 0.0
    """Time from the start of the trajectory to its end, without the wait for a free slot."""
    turns: tuple[float, ...] = ()
    """Time of each turn of the model (`Trajectory.num_turns`), from the request to the generator's answer, including
    the engine's queue. Their sum is `generate` without turns that left no tokens, such as after a fault. Empty in
    records older than this field."""


@dataclass(frozen=True)
class Trajectory:
    """One finished trajectory: the segments of the prompt, followed by those of the response.

    The response contains everything that was written, in order. If the model's context was shortened or replaced on the
    way, `contexts` has what the model was fed instead, and the trajectory is trained as several rows (`rows`).
    """

    trajectory_id: str
    segments: tuple[Segment, ...]
    stop: StopReason
    prompt_segments: int = 1
    """Number of `segments` in the prompt: more than one if it has images or an observation of `call_tool_first`."""
    calls: tuple[CallRecord, ...] = ()
    fault: Fault | None = None
    excluded: Excluded | None = None
    loss_on_observations: bool = False
    """Whether the option `mask_observations` was False."""
    prompt_truncated: bool = False
    verdict: Verdict | None = None
    """What the verifier or the environment judged; None without one, or after a fault or an abort."""
    reward: float | None = None
    """The reward from the reward manager, once it is known."""
    timings: Timings = Timings()
    images: Annotated[dict[str, ImagePart], Field(exclude=True)] = field(default_factory=dict)
    """Images of the segments, by SHA-256. A record stores the hashes; `write_jsonl` writes the files next to it."""
    generator: dict[str, Any] = field(default_factory=dict)
    """`Generation.details` of the last turn (JSON values)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional values that the caller stores in the record (JSON values)."""
    contexts: tuple[RowContext, ...] = ()
    """Prompts of the training rows after the first. Row k has `contexts[k - 1]` and the segments with `row` k."""

    @property
    def row(self) -> dict[str, Any]:
        """The data set's row as stored in `extra`: ``index`` and, if it is known, ``data_source``."""
        index, source = self.extra.get("index"), self.extra.get("data_source")
        return {"index": index} if source is None else {"index": index, "data_source": source}

    @property
    def sampled_extra(self) -> dict[str, Any]:
        """`extra` without what the trainer added, such as the grading."""
        return {name: value for name, value in self.extra.items() if name not in _FROM_TRAINER}

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids that the model was fed first. [prompt_length]"""
        return _tokens(self.segments[: self.prompt_segments])

    @property
    def response(self) -> tuple[Segment, ...]:
        """The segments after the prompt."""
        return self.segments[self.prompt_segments :]

    @property
    def response_ids(self) -> list[int]:
        """Token ids after the prompt, of the model and of the tools. [response_length]"""
        return _tokens(self.response)

    @property
    def response_mask(self) -> list[int]:
        """1 for tokens that the model wrote, 0 for all others. [response_length]"""
        return [int(s.generated) for s in self.response for _ in s.tokens]

    @property
    def loss_mask(self) -> list[int]:
        """1 for tokens in the loss, which depends on `excluded` and `mask_observations`. [response_length]"""
        if self.excluded is not None:
            return [0] * sum(len(s.tokens) for s in self.response)
        if self.loss_on_observations:
            return [1] * sum(len(s.tokens) for s in self.response)
        return self.response_mask

    @property
    def turn_ids(self) -> list[int]:
        """k for tokens of the model's k-th turn (from 1), of the summary before it and of the sub-agents that it
        started; 0 for all others. [response_length]"""
        ids, turn = [], 0
        for segment in self.response:
            turn += segment.is_turn
            before_turn = segment.summary and not segment.agent
            ids += [turn + before_turn if segment.generated else 0] * len(segment.tokens)
        return ids

    @property
    def turn_calls(self) -> tuple[CallRecord, ...]:
        """The main agent's calls, without those that the loop made before the model's first turn and those over MCP.
        The k-th call ended the k-th turn."""
        turns = self.num_turns
        calls = tuple(call for call in self.calls if not (call.agent or call.over_mcp or call.opens))
        first_request = bool(calls) and not calls[0].action
        in_prompt = any(segment.author is not Author.PROMPT for segment in self.segments[: self.prompt_segments])
        called_first = first_request and (in_prompt or len(calls) > turns)
        return calls[called_first:][:turns]

    @property
    def response_log_probs(self) -> list[float] | None:
        """The generator's log-probabilities, 0.0 for tokens that it did not write. [response_length]

        None if the generator returned none.
        """
        written = [s for s in self.response if s.generated]
        if any(s.log_probs is None for s in written):
            return None
        return [p for s in self.response for p in (s.log_probs or (0.0,) * len(s.tokens))]

    @property
    def num_turns(self) -> int:
        """Number of turns of the main agent, without summaries."""
        return sum(s.is_turn for s in self.response)

    @property
    def row_spans(self) -> list[list[tuple[int, int]]]:
        """Where the pieces of each training row are in the response, as pairs of start and length in tokens. Rows are
        in numerical order; a row without response tokens is empty."""
        spans: list[list[tuple[int, int]]] = [[] for _ in range(1 + len(self.contexts))]
        start = 0
        for segment in self.response:
            row = spans[segment.row]
            if row and sum(row[-1]) == start:
                row[-1] = row[-1][0], row[-1][1] + len(segment.tokens)
            elif segment.tokens:
                row.append((start, len(segment.tokens)))
            start += len(segment.tokens)
        return spans

    @property
    def row_numbers(self) -> list[int]:
        """Numbers of the rows with response tokens, in the order in which they end; the last is the main agent's."""
        ends = {segment.row: place for place, segment in enumerate(self.response) if segment.tokens}
        final = next((segment.row for segment in reversed(self.response) if segment.tokens and not segment.agent), 0)
        return sorted(ends, key=lambda row: (row == final, ends[row]))

    @property
    def rows(self) -> tuple[Trajectory, ...]:
        """The training rows as trajectories with one context each, in the order of `row_numbers`."""
        if not self.contexts:
            return (self,)
        prompts = [self.segments[: self.prompt_segments]]
        prompts += [context.segments for context in self.contexts]
        return tuple(
            replace(
                self,
                segments=(*prompts[row], *(segment for segment in self.response if segment.row == row)),
                prompt_segments=len(prompts[row]),
                contexts=(),
            )
            for row in self.row_numbers
        )

    @property
    def visible_images(self) -> list[ImagePart]:
        """The images of the segments in order, as the engine and the trainer receive them."""
        return [self.images[s.image] for s in self.segments if s.image is not None]

    @property
    def tool_rewards(self) -> list[float]:
        """Rewards from tools, in the order of the calls."""
        return [c.reward for c in self.calls if c.reward is not None]

    @property
    def response_text(self) -> str:
        """Text after the prompt, where segments were decoded."""
        return "".join(s.text for s in self.response)

    @property
    def model_text(self) -> str:
        """Text of the main agent's turns, including edited ones. Rewards should be computed from it."""
        return "".join(s.text for s in self.response if s.is_turn)

    def with_reward(self, reward: float | None) -> Trajectory:
        """Return a copy with a reward."""
        return replace(self, reward=reward)

    def ungraded(self) -> Trajectory:
        """Return a copy as it was before the trainer graded it."""
        excluded = None if self.excluded in (Excluded.GRADER, Excluded.SINGLETON) else self.excluded
        return replace(self, reward=None, excluded=excluded)

    def to_json(self) -> str:
        """Serialise to one line of JSON, without a line end."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, line: str | bytes) -> Trajectory:
        """Parse one line. Raises pydantic's ValidationError if it is not a trajectory."""
        return _ADAPTER.validate_json(line)


def write_jsonl(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one line per trajectory, replacing the file. Images are written to the folder ``images`` next to it."""
    with path.open("w", encoding="utf-8") as file:
        for trajectory in trajectories:
            save_images(path.parent / "images", trajectory.images.values())
            file.write(trajectory.to_json() + "\n")


def save_images(folder: Path, images: Iterable[ImagePart]) -> None:
    """Write missing images to `folder`, named by their hashes. The folder is created if there are any images."""
    for image in images:
        path = folder / f"{image.sha256}.{image.media_type.removeprefix('image/')}"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as draft:
                draft.write_bytes(image.data)


def as_trajectory(record: Trajectory | str) -> Trajectory:
    """Return `record`, which may be its JSON, as a foreign agent loop gives it."""
    return Trajectory.from_json(record) if isinstance(record, str) else record


def read_jsonl(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file."""
    with path.open("rb") as file:
        for line in file:
            yield Trajectory.from_json(line)


def _tokens(segments: Sequence[Segment]) -> list[int]:
    return [token for segment in segments for token in segment.tokens]


# A log-probability may be -inf, which JSON cannot represent; it is written as the string "-Infinity".
with_config(ConfigDict(ser_json_inf_nan="strings"))(Trajectory)
_ADAPTER = TypeAdapter(Trajectory)
