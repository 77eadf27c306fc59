"""Build the record of a trajectory turn by turn, while it runs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from verl_tool.agent_loop.actions import Action, ParsedTurn, parsed_calls
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.observation import without_surrogates
from verl_tool.agent_loop.observation_renderer import ObservationRenderer
from verl_tool.agent_loop.options import EpisodeOptions, Side
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import (
    DELEGATED,
    Author,
    CallRecord,
    Excluded,
    RowContext,
    Segment,
    StopReason,
    Timings,
    Trajectory,
)
from verl_tool.content.parts import ImagePart
from verl_tool.formats import Format
from verl_tool.protocol import SENT_ONCE, Fault, FaultKind, StepResult
from verl_tool.verification import Verdict

_T = TypeVar("_T")
_Unit: TypeAlias = "tuple[Author, int | None, tuple[int, ...]]"
"""An indivisible part of segments: its author, the number of its segment if it is an image, and its tokens."""
_SERVER_EXITED = frozenset({FaultKind.UNREACHABLE, FaultKind.OVERLOADED, FaultKind.TIMEOUT, FaultKind.SHUTTING_DOWN})


@dataclass
class TrajectoryBuilder:
    """A trajectory in progress."""

    trajectory_id: str
    uses_tools: bool
    sampling_params: dict[str, Any]
    extra: dict[str, Any]
    max_turns: int = 0
    max_response_length: int | None = None
    max_model_len: int | None = None
    formats: Sequence[Format] = ()
    """Formats in which the model writes calls."""
    renderer: ObservationRenderer | None = None
    """Renders observations. Defaults to the Episode's renderer."""
    task_prompt: Callable[[str], Sequence[int]] | None = None
    """Renders the prompt of a sub-agent. By default the task becomes a user message."""
    min_turns: int = 0
    every_turn: bool = False
    """Whether a turn without a call is sent to the trajectory's environment."""
    unsent_text: str = ""
    """The model's last turn, if it was not sent to the tools."""
    agent: int = 0
    """The agent that is running, as in `Segment.agent`."""
    depth: int = 0
    """Number of agents that wait for this agent's answer."""
    row: int = 0
    """Number of the current training row."""
    started: float = field(default_factory=lambda: now())
    context: list[int] = field(default_factory=list)
    """All tokens that the model is fed at its next turn."""
    segments: list[Segment] = field(default_factory=list)
    contexts: list[RowContext] = field(default_factory=list)
    """Prompts of the training rows after the first."""
    prompt_segments: int = 1
    prompt_length: int = 0
    """Number of tokens at the start of `context` that are the prompt of its training row."""
    prompt_truncated: bool = False
    images: dict[str, ImagePart] = field(default_factory=dict)
    """Images of the segments, by SHA-256."""
    calls: list[CallRecord] = field(default_factory=list)
    summary_due: bool = False
    """Whether the last observation asks the model for a summary of its context."""
    resumed_turns: int = 0
    """Number of turns in the trajectory that this one resumes (`resume`)."""
    fault: Fault | None = None
    calling: bool = False
    """Whether a call is in progress. If it is cancelled, the tool server may still keep state."""
    verdict: Verdict | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    generate_seconds: float = 0.0
    turn_seconds: list[float] = field(default_factory=list)
    """Time of each turn that left a segment."""

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.context) - self.prompt_length

    @property
    def remaining_tokens(self) -> int | None:
        """Number of tokens that may still follow; None without a limit."""
        response, model = self.max_response_length, self.max_model_len
        limits = [
            None if response is None else response - self.response_length,
            None if model is None else model - len(self.context),
        ]
        return min((n for n in limits if n is not None), default=None)

    @property
    def invalid_calls_in_a_row(self) -> int:
        """Number of invalid calls since this agent's last valid one."""
        own = [call for call in self.calls if call.agent == self.agent]
        return sum(1 for _ in itertools.takewhile(lambda call: not call.valid, reversed(own)))

    @property
    def num_subagents(self) -> int:
        """Number of sub-agents that the trajectory has started."""
        return sum(context.reason == DELEGATED for context in self.contexts)

    @property
    def own_segments(self) -> list[Segment]:
        """The prompt and the segments of this agent."""
        response = self.segments[self.prompt_segments :]
        return [*self.segments[: self.prompt_segments], *(each for each in response if each.agent == self.agent)]

    @property
    def sent_calls(self) -> list[CallRecord]:
        """The calls that were sent to the tool server."""
        return [call for call in self.calls if not call.local]

    @property
    def visible_images(self) -> list[ImagePart]:
        """The images of the segments, in order."""
        return [self.images[segment.image] for segment in self.segments if segment.image is not None]

    @property
    def has_server_state(self) -> bool:
        """Whether the tool server may hold state for this trajectory and can be reached to release it."""
        if self.calling:
            return True
        sent = self.sent_calls
        if not sent or sent[-1].done:
            return False
        fault = sent[-1].fault
        return fault is None or fault.kind not in _SERVER_EXITED

    def set_prompt(
        self, segments: list[Segment], images: Sequence[ImagePart], limit: int | None, tokenizer: Tokenizer
    ) -> None:
        """Start from the row's prompt with its `images`, truncated on the left to `limit`. Raises ValueError if the
        prompt is empty."""
        if not any(segment.tokens for segment in segments):
            raise ValueError("the prompt is empty; a model needs at least one token to continue")
        stored = segments if limit is None else cut_segments(segments, limit, "left", tokenizer)
        self.prompt_truncated = stored is not segments
        self.images |= {image.sha256: image for image in images}
        self.replace_prompt(stored)

    def resume(self, partial: Trajectory) -> None:
        """Continue after `partial`, whose segments and calls are kept as they are. The extra data of a first call
        (`SENT_ONCE`) is not sent again."""
        self.segments, self.calls = list(partial.segments), list(partial.calls)
        last = partial.rows[-1]
        self.context = [token for segment in last.segments for token in segment.tokens]
        self.contexts, self.row = list(partial.contexts), len(partial.contexts)
        self.prompt_segments, self.prompt_length = partial.prompt_segments, len(last.prompt_ids)
        self.prompt_truncated = partial.prompt_truncated
        self.images |= partial.images
        self.resumed_turns = partial.num_turns
        self.turn_seconds = list(partial.timings.turns[: self.resumed_turns]) or [0.0] * self.resumed_turns
        self.generate_seconds = sum(self.turn_seconds)
        self.started -= self.generate_seconds + sum(call.seconds for call in partial.calls)
        if partial.calls:
            for name in SENT_ONCE:
                self.extra.pop(name, None)

    def replace_prompt(self, segments: list[Segment], truncated: bool = False) -> None:
        """Make `segments` the prompt. `truncated` says that they show only a part of the last recorded observation."""
        self.segments = list(segments)
        self.context = [token for segment in segments for token in segment.tokens]
        self.prompt_segments, self.prompt_length = len(segments), len(self.context)
        if self.calls:
            self._record_visible_images(segments, truncated)

    def take_images(self, result: StepResult) -> list[ImagePart]:
        """Store the images of an answer for its segments, and return them."""
        images = [image for image in result.image or () if isinstance(image, ImagePart)]
        self.images |= {image.sha256: image for image in images}
        return images

    def start_row(self, tokens: Sequence[int], reason: str) -> None:
        """Start a new training row, whose prompt `tokens` replaces the context."""
        self.contexts.append(RowContext(tuple(tokens), reason))
        self.context, self.prompt_length, self.row = list(tokens), len(tokens), len(self.contexts)

    def start_subagent(self, prompt: Segment, max_turns: int) -> TrajectoryBuilder:
        """Return the builder of a sub-agent that starts from `prompt` in a new row. It shares calls and rows with this
        one."""
        child = replace(
            self,
            max_turns=max_turns,
            segments=[prompt],
            prompt_segments=1,
            every_turn=False,
            agent=self.num_subagents + 1,
            depth=self.depth + 1,
            summary_due=False,
            resumed_turns=0,
            generate_seconds=0.0,
            turn_seconds=[],
        )
        child.start_row(prompt.tokens, DELEGATED)
        return child

    def join_subagent(self, child: TrajectoryBuilder) -> None:
        """Append what the sub-agent wrote since `start_subagent`."""
        self.segments += child.segments[child.prompt_segments :]
        self.generate_seconds += child.generate_seconds
        self.calling, self.details = child.calling, child.details

    def append_generation(
        self, generation: Generation, turn: ParsedTurn, seconds: float, *, summary: bool = False
    ) -> None:
        """Append a turn of the model, or its `summary`, that took `seconds`. Without tokens, no segment is added."""
        self.details = generation.details
        if generation.token_ids:
            log_probs = None if generation.log_probs is None else tuple(generation.log_probs)
            tokens = tuple(generation.token_ids)
            spans = None if summary else turn.call_spans
            self._append(Segment(Author.MODEL, tokens, log_probs, turn.raw_text, call_spans=spans, summary=summary))
            if not summary:
                self.turn_seconds.append(seconds)

    def append_observation(self, segments: list[Segment], truncated: bool) -> None:
        """Append the observation of the last recorded call. `truncated` says that the segments show only a part."""
        for segment in segments:
            self._append(segment)
        self._record_visible_images(segments, truncated)

    def _append(self, segment: Segment) -> None:
        self.segments.append(replace(segment, row=self.row, agent=self.agent) if self.contexts else segment)
        self.context.extend(segment.tokens)

    def _record_visible_images(self, segments: list[Segment], truncated: bool) -> None:
        self.calls[-1] = replace(self.calls[-1], visible_tokens=tool_tokens(segments), truncated=truncated)

    def record(
        self, action: Action, result: StepResult, seconds: float, *, local: bool = False, opens: bool = False
    ) -> None:
        """Record an action and its answer, which is the loop's own if `local`, and with `opens` an environment's
        opening. A valid action in which no format finds a call used the tag of a tool."""
        valid = result.valid and result.fault is None
        # A tag in a turn that an environment takes as a whole is a word of the model, and no tool's.
        calls = parsed_calls(action.sent_calls if valid and not self.every_turn else action.calls)
        self.calls.append(
            CallRecord(
                step=len(self.sent_calls),
                action=action.text,
                observation=without_surrogates(result.observation),
                valid=valid,
                done=result.done,
                reward=result.reward,
                invalid_reason=result.invalid_reason,
                fault=result.fault,
                metrics=dict(result.metrics or {}),
                seconds=seconds,
                names=tuple(sorted({call.name for call in calls})),
                calls=calls,
                agent=self.agent,
                local=local,
                opens=opens,
            )
        )

    def build(self, stop: StopReason, options: EpisodeOptions) -> Trajectory:
        """Return the finished trajectory."""
        tools = sum(call.seconds for call in self.calls)
        return Trajectory(
            trajectory_id=self.trajectory_id,
            segments=tuple(self.segments),
            stop=stop,
            prompt_segments=self.prompt_segments,
            calls=tuple(self.calls),
            contexts=tuple(self.contexts),
            fault=self.fault,
            excluded=self._excluded(stop, options),
            verdict=self.verdict,
            loss_on_observations=not options.mask_observations,
            prompt_truncated=self.prompt_truncated,
            timings=Timings(self.generate_seconds, tools, now() - self.started, tuple(self.turn_seconds)),
            images={image.sha256: image for image in self.visible_images},
            generator=dict(self.details),
        )

    def _excluded(self, stop: StopReason, options: EpisodeOptions) -> Excluded | None:
        if stop is StopReason.FAULT:
            return None if self.is_policy_induced else Excluded.FAULT
        if stop is StopReason.ABORTED:
            return Excluded.ABORTED
        if options.mask_overlong_loss and stop.overlong:
            return Excluded.OVERLONG
        if options.mask_void_traj and self._is_void(options):
            return Excluded.VOID
        return None

    @property
    def is_policy_induced(self) -> bool:
        """Whether the model's call may have caused the fault, be it by an image in its answer that cannot be shown. If
        such faults were excluded, a policy could learn to cause them."""
        last = self.calls[-1] if self.calls else None
        if last is None or last.opens or not (last.action or any(segment.is_turn for segment in self.segments)):
            return False
        if last.fault is not None:
            return last.fault.kind.provokable
        return self.fault is not None and self.fault.kind is FaultKind.TOOL_CRASHED

    def _is_void(self, options: EpisodeOptions) -> bool:
        written = "".join(s.text for s in self.segments if s.is_turn)
        answered = any(marker in written for marker in options.answer_markers)
        return not answered and not any(call.valid and not call.opens for call in self.calls)


def cut_segments(segments: list[Segment], limit: int, side: Side, tokenizer: Tokenizer) -> list[Segment]:
    """Truncate `segments` to `limit` tokens by dropping tokens at `side`. An image is kept or dropped as a whole."""
    if sum(len(segment.tokens) for segment in segments) <= limit:
        return segments
    # An image is one unit, and so is each token outside of images.
    units: list[_Unit] = []
    for number, segment in enumerate(segments):
        parts = [(token,) for token in segment.tokens] if segment.image is None else [segment.tokens]
        units += [(segment.author, None if segment.image is None else number, part) for part in parts]
    n_head = {"left": 0, "right": limit, "middle": limit - limit // 2}[side]
    head = longest_prefix(units, _length, n_head)
    stored = [*head, *longest_prefix(units[len(head) :][::-1], _length, limit - n_head)[::-1]]
    cut: list[Segment] = []
    for (author, image), run in itertools.groupby(stored, key=lambda unit: unit[:2]):
        ids = tuple(token for _, _, part in run for token in part)
        cut.append(Segment(author, ids, text=tokenizer.decode(ids)) if image is None else segments[image])
    return cut


def longest_prefix(units: Sequence[_T], size: Callable[[_T], int], limit: int) -> Sequence[_T]:
    """Return the longest prefix of `units` whose total size is at most `limit`."""
    for n, total in enumerate(itertools.accumulate(map(size, units))):
        if total > limit:
            return units[:n]
    return units


def _length(unit: _Unit) -> int:
    return len(unit[2])


def tool_tokens(segments: Sequence[Segment]) -> int:
    """Count the tokens of observations."""
    return sum(len(s.tokens) for s in segments if s.author is Author.TOOL)


def now() -> float:
    """Return the time of the event loop's clock in seconds."""
    return asyncio.get_running_loop().time()
