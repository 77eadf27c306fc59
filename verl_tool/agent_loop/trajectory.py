"""What happened in one trajectory: who wrote which tokens, which calls were made, what failed, how long it took.

One line of JSON a trajectory, both ways.
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
"""Column of a batch: true of a trajectory that ended in a fault or was aborted."""
REWARD_FAULT = "reward_fault"
"""Key of ``reward_extra_info``: why there is no reward, or ``""``. The trainer must leave such a row out of the loss,
of its group's baseline and of validation's means, as it leaves out a trajectory whose tools failed."""
RAISES_ON_EMPTY = "it raises on an empty answer too"
"""In a `REWARD_FAULT`: the reward manager has a bug, which leaves out the answers that it cannot read."""
POLICY_INDUCED = "reward_provoked"
"""Key of ``reward_extra_info``: how grading this answer failed where grading an empty one does not, or ``""``. Such a
row has the score of an empty answer and counts: left out, a policy would learn to write what no grader stands."""

ROW_REWARDS = "row_rewards"
"""Key of ``reward_extra_info``: what each of `Trajectory.rows` is rewarded with by itself, as a list in JSON; the
rollout's reward holds their sum."""
BONUS = "curiosity_bonus"
"""Key of a record's ``reward_extra_info``: what the trainer added to the reward for what its group tried."""
RECORD_PLACES = "record_places"
"""Of a row of verl's batch, where its pieces stand in the record's response: pairs of start and length, in tokens."""
VERSIONS = "versions"
"""Of a record's ``extra``: the weights that sampled it, as updates before them, the oldest and the newest."""
GROUP = "group"
"""Of a record's ``extra``: the line, from 0, of the step's first trajectory that is a sample of the same prompt."""


class Author(str, Enum):
    """Who wrote a segment's tokens."""

    PROMPT = "prompt"
    """The data set's row, rendered."""
    MODEL = "model"
    """The generator. The only tokens with mask 1, those of an edited turn left out (`Segment.edited`)."""
    TOOL = "tool"
    """The tool server: text of an observation."""
    TEMPLATE = "template"
    """The chat template (or `mtrl_sep`): the tokens that close a turn and open the next."""


class StopReason(str, Enum):
    """Why a trajectory ended."""

    ANSWERED = "answered"
    """The model ended its turn without an action."""
    TOOL_DONE = "tool_done"
    """A tool ended the trajectory (`finish`, say)."""
    MAX_TURNS = "max_turns"
    """`max_turns` tool turns were made, and the model asked for more or may write no more."""
    INVALID_CALLS = "invalid_calls"
    """`max_invalid_calls` calls in a row were invalid."""
    MAX_ACTION_LENGTH = "max_action_length"
    """The model's turn was cut at `max_action_length`."""
    MAX_RESPONSE_LENGTH = "max_response_length"
    """`max_response_length` or `max_model_len` leaves no room to go on, or the model's turn was cut there."""
    FAULT = "fault"
    """Infrastructure failed; see `Trajectory.fault`."""
    ABORTED = "aborted"
    """The generator gave up this request (the engine stopped or changed its weights)."""

    @property
    def finished(self) -> bool:
        """The trajectory came to an end of its own: no limit and no fault cut it."""
        return self in (StopReason.ANSWERED, StopReason.TOOL_DONE)

    @property
    def overlong(self) -> bool:
        """A limit of length or turns ended the trajectory."""
        return self in (StopReason.MAX_TURNS, StopReason.MAX_ACTION_LENGTH, StopReason.MAX_RESPONSE_LENGTH)


class Excluded(str, Enum):
    """Why a trajectory is left out of the loss and, for `FAULT`, `ABORTED` and `GRADER`, of its group's baseline."""

    FAULT = "fault"
    """Infrastructure failed. A fault that the model's own call may have caused leaves nothing out."""
    ABORTED = "aborted"
    GRADER = "grader"
    """There is no reward; the trainer tells it, the loop does not know."""
    SINGLETON = "lone"
    """The others of its group, or its greedy baseline, are left out: nothing compares with it. Told by the trainer."""
    OVERLONG = "overlong"
    """`mask_overlong_loss`: a limit ended it."""
    VOID = "void"
    """`mask_void_traj`: no valid call and no final answer."""


@dataclass(frozen=True)
class Segment:
    """Tokens of one author, in the order in which the model saw them."""

    author: Author
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None
    """One a token, of the model's segments only; None if the generator gave none."""
    text: str = ""
    """The tokens as text, for readers; nothing is ever encoded from it. Empty if nobody decoded them."""
    image: str | None = None
    """SHA-256 of the image that the tokens stand for, all of it: such a segment is never cut."""
    call_spans: tuple[tuple[int, int], ...] | None = None
    """Where in `text` each call begins and ends, of the model's segments; None if nobody looked."""
    edited: bool = False
    """Somebody wrote this in the place of `author`, who wrote something else there in another trajectory."""
    row: int = 0
    """The training row that the tokens are part of; see `Trajectory.contexts`."""
    summary: bool = False
    """The model's summary of its context (``context=summarise``), which is no turn."""
    agent: int = 0
    """The agent whose context the tokens stand in. 0: the main one; k: the k-th sub-agent."""

    @property
    def generated(self) -> bool:
        """Whether the generator drew the tokens."""
        return self.author is Author.MODEL and not self.edited

    @property
    def is_turn(self) -> bool:
        """Whether this is a turn of the main agent."""
        return self.author is Author.MODEL and not self.summary and not self.agent


DELEGATED = "delegate"
"""Reason of a sub-agent's first row."""


@dataclass(frozen=True)
class RowContext:
    """What the model was fed at the start of a further training row: tokens of before, or of a template."""

    tokens: tuple[int, ...]
    reason: str
    """What made the row: an option (``window``, ``summarise``, ``drop_thoughts``), or `DELEGATED`."""


@dataclass(frozen=True)
class ParsedCall:
    """One call in an action, as the loop found it there."""

    name: str
    """As the model named it."""
    arguments: str
    """A JSON object, as in OpenAI's ``tool_calls``; free text (code, a query) is its one member ``input``."""
    start: int
    end: int
    """Where it stands in the action's text."""


@dataclass(frozen=True)
class CallRecord:
    """One call of the tool server."""

    step: int
    """Number of the call among those that the tool server was sent, from 0; of a `local` one, that of the next."""
    action: str
    observation: str = ""
    """As the server gave it, before any truncation."""
    valid: bool = True
    done: bool = False
    reward: float | None = None
    invalid_reason: str | None = None
    fault: Fault | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    visible_tokens: int = 0
    """Tokens of the observation that the model was fed, the template's not counted."""
    truncated: bool = False
    """The model was shown less than `observation`."""
    seconds: float = 0.0
    names: tuple[str, ...] = ()
    """The tools that the action calls, each once, as the model named them; none in records of before."""
    calls: tuple[ParsedCall, ...] | None = None
    """The calls in the action, in the order of the text; None in records of before (`actions.calls_of`)."""
    agent: int = 0
    """As `Segment.agent`."""
    local: bool = False
    """The loop answered it (``delegate``), and the tool server was not asked. `seconds` is 0: those of the sub-agent
    are in the timings."""


@dataclass(frozen=True)
class Timings:
    """Where the time went, in seconds."""

    generate: float = 0.0
    tools: float = 0.0
    total: float = 0.0
    """From the start of the trajectory (not of its wait for a free place) to its end."""
    turns: tuple[float, ...] = ()
    """Of each turn of the model (`Trajectory.num_turns`), in their order: from asking the generator to its answer, on a
    monotonic clock; the engine's queue is part of it. Their sum is `generate` less the turns of which nothing is kept
    (a fault, no token). None in records of before."""


@dataclass(frozen=True)
class Trajectory:
    """One finished trajectory. The prompt's segments come first; all that follows is the response.

    The response is all that was written, in the order in which it was. Where the model's context lost some of it on the
    way, `contexts` tell what it was fed instead, and the trajectory is trained as several rows (`rows`).
    """

    trajectory_id: str
    segments: tuple[Segment, ...]
    stop: StopReason
    prompt_segments: int = 1
    """How many of `segments` are the prompt: more than one if it has images, or `call_tool_first` added an
    observation."""
    calls: tuple[CallRecord, ...] = ()
    fault: Fault | None = None
    excluded: Excluded | None = None
    loss_on_observations: bool = False
    """`mask_observations=False`."""
    prompt_truncated: bool = False
    verdict: Verdict | None = None
    """What a verifier said of the workspace that the trajectory left; None if there was none, or the trajectory ended
    in a fault or was aborted."""
    reward: float | None = None
    """The reward manager's, once it is known."""
    timings: Timings = Timings()
    images: Annotated[dict[str, ImagePart], Field(exclude=True)] = field(default_factory=dict)
    """By SHA-256, the images that segments stand for. A record names them only; `write_jsonl` puts them beside it."""
    generator: dict[str, Any] = field(default_factory=dict)
    """What the generator told besides tokens, of its last turn (JSON values)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Whatever the caller wants in the record (JSON values)."""
    contexts: tuple[RowContext, ...] = ()
    """Of each training row after the first, the prompt. Row k has `contexts[k - 1]` and the segments with `row` k."""

    @property
    def row(self) -> dict[str, Any]:
        """What `extra` tells of the data set's row: ``index`` and, if it is known, ``data_source``."""
        description = {"index": self.extra.get("index"), "data_source": self.extra.get("data_source")}
        return description if description["data_source"] is not None else {"index": description["index"]}

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids that the model was first fed. [prompt_length]"""
        return _tokens(self.segments[: self.prompt_segments])

    @property
    def response(self) -> tuple[Segment, ...]:
        """The segments behind the prompt."""
        return self.segments[self.prompt_segments :]

    @property
    def response_ids(self) -> list[int]:
        """Token ids behind the prompt, of the model and of the tools. [response_length]"""
        return _tokens(self.response)

    @property
    def response_mask(self) -> list[int]:
        """1 on tokens that the model wrote, 0 on all others. [response_length]"""
        return [int(s.generated) for s in self.response for _ in s.tokens]

    @property
    def loss_mask(self) -> list[int]:
        """The tokens that the loss is put on, `excluded` and `mask_observations` regarded. [response_length]"""
        if self.excluded is not None:
            return [0] * sum(len(s.tokens) for s in self.response)
        if self.loss_on_observations:
            return [1] * sum(len(s.tokens) for s in self.response)
        return self.response_mask

    @property
    def turn_ids(self) -> list[int]:
        """k on tokens of the model's k-th turn, counted from 1, on those of a summary before it and of the sub-agents
        that it started; 0 on all others. [response_length]"""
        ids, turn = [], 0
        for segment in self.response:
            turn += segment.is_turn
            before_turn = segment.summary and not segment.agent
            ids += [turn + before_turn if segment.generated else 0] * len(segment.tokens)
        return ids

    @property
    def turn_calls(self) -> tuple[CallRecord, ...]:
        """The calls that the main agent made: the k-th ended its k-th turn. That of `call_tool_first` is not among
        them."""
        turns, calls = self.num_turns, tuple(call for call in self.calls if not call.agent)
        first_request = bool(calls) and not calls[0].action
        in_prompt = any(segment.author is not Author.PROMPT for segment in self.segments[: self.prompt_segments])
        loops_own = first_request and (in_prompt or len(calls) > turns)
        return calls[loops_own:][:turns]

    @property
    def response_log_probs(self) -> list[float] | None:
        """Log-probabilities by the generator, 0.0 on tokens that it did not write. [response_length]

        None if the generator gave none.
        """
        written = [s for s in self.response if s.generated]
        if any(s.log_probs is None for s in written):
            return None
        return [p for s in self.response for p in (s.log_probs or (0.0,) * len(s.tokens))]

    @property
    def num_turns(self) -> int:
        """Turns of the main agent, summaries left out."""
        return sum(s.is_turn for s in self.response)

    @property
    def row_places(self) -> list[list[tuple[int, int]]]:
        """Of each training row, where its pieces stand in the response: pairs of start and length, in tokens. Rows are
        in the order of their numbers; one that nothing was written in is empty."""
        places: list[list[tuple[int, int]]] = [[] for _ in range(1 + len(self.contexts))]
        start = 0
        for segment in self.response:
            row = places[segment.row]
            if row and sum(row[-1]) == start:
                row[-1] = row[-1][0], row[-1][1] + len(segment.tokens)
            elif segment.tokens:
                row.append((start, len(segment.tokens)))
            start += len(segment.tokens)
        return places

    @property
    def row_numbers(self) -> list[int]:
        """The rows that something was written in, in the order in which they end; the last one is the main agent's."""
        ends = {segment.row: place for place, segment in enumerate(self.response) if segment.tokens}
        final = next((segment.row for segment in reversed(self.response) if segment.tokens and not segment.agent), 0)
        return sorted(ends, key=lambda row: (row == final, ends[row]))

    @property
    def rows(self) -> tuple[Trajectory, ...]:
        """The training rows, each a trajectory of one context, in the order of `row_numbers`."""
        if not self.contexts:
            return (self,)
        prompts = [self.segments[: self.prompt_segments]]
        prompts += [(Segment(Author.PROMPT, context.tokens),) for context in self.contexts]
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
        """The image of each segment that stands for one, in their order: what an engine and a trainer are given."""
        return [self.images[s.image] for s in self.segments if s.image is not None]

    @property
    def tool_rewards(self) -> list[float]:
        """Rewards that tools gave, in order of the calls that gave one."""
        return [c.reward for c in self.calls if c.reward is not None]

    @property
    def response_text(self) -> str:
        """Text behind the prompt, as far as segments hold it."""
        return "".join(s.text for s in self.response)

    @property
    def model_text(self) -> str:
        """What the main agent wrote in its turns, an edited one included: what a reward should look at."""
        return "".join(s.text for s in self.response if s.is_turn)

    def with_reward(self, reward: float | None) -> Trajectory:
        """The same with a reward."""
        return replace(self, reward=reward)

    def ungraded(self) -> Trajectory:
        """The same as it was before a trainer graded it."""
        excluded = None if self.excluded in (Excluded.GRADER, Excluded.SINGLETON) else self.excluded
        return replace(self, reward=None, excluded=excluded)

    def to_json(self) -> str:
        """One line of JSON, without the line's end."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, line: str | bytes) -> Trajectory:
        """The trajectory of one line. Raises pydantic's ValidationError if the line is none."""
        return _ADAPTER.validate_json(line)


def write_jsonl(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one line a trajectory, replacing the file, and their images into the folder ``images`` beside it."""
    with path.open("w", encoding="utf-8") as file:
        for trajectory in trajectories:
            save_images(path.parent / "images", trajectory.images.values())
            file.write(trajectory.to_json() + "\n")


def save_images(folder: Path, images: Iterable[ImagePart]) -> None:
    """Write each image that is not there into `folder`, named by its hash; the folder is made if there is any image."""
    for image in images:
        path = folder / f"{image.sha256}.{image.media_type.removeprefix('image/')}"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as draft:
                draft.write_bytes(image.data)


def read_jsonl(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file, one by one."""
    with path.open("rb") as file:
        for line in file:
            yield Trajectory.from_json(line)


def _tokens(segments: Sequence[Segment]) -> list[int]:
    return [token for segment in segments for token in segment.tokens]


# A log-probability may be -inf: JSON has no such number, so it is written as the string "-Infinity".
with_config(ConfigDict(ser_json_inf_nan="strings"))(Trajectory)
_ADAPTER = TypeAdapter(Trajectory)
