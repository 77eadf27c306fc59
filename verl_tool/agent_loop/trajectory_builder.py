"""A trajectory under way: what the loop writes down turn by turn."""

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
from verl_tool.protocol import AUDIOS_FIELD, FILES_FIELD, IMAGES_FIELD, Fault, FaultKind, StepResult
from verl_tool.verification import Verdict

SENT_ONCE = (FILES_FIELD, IMAGES_FIELD, AUDIOS_FIELD)
"""Extra data that goes with the first call only, whichever that is."""
_T = TypeVar("_T")
_Unit: TypeAlias = "tuple[Author, int | None, tuple[int, ...]]"
"""What is kept or dropped whole: its author, the number of its segment if it is an image, its tokens."""
_SERVER_EXITED = frozenset({FaultKind.UNREACHABLE, FaultKind.OVERLOADED, FaultKind.TIMEOUT, FaultKind.SHUTTING_DOWN})


@dataclass
class TrajectoryBuilder:
    """A trajectory under way."""

    trajectory_id: str
    uses_tools: bool
    sampling_params: dict[str, Any]
    extra: dict[str, Any]
    max_turns: int = 0
    max_response_length: int | None = None
    max_model_len: int | None = None
    formats: Sequence[Format] = ()
    """Those in which its calls are written."""
    renderer: ObservationRenderer | None = None
    """Appends its observations. None: the Episode's."""
    task_prompt: Callable[[str], Sequence[int]] | None = None
    """Renders the prompt of a sub-agent. None: a user's message."""
    agent: int = 0
    """As `Segment.agent`."""
    depth: int = 0
    """The number of agents that wait for this one's answer."""
    row: int = 0
    """The training row that is written."""
    started: float = field(default_factory=lambda: now())
    context: list[int] = field(default_factory=list)
    """All tokens so far: what the model is fed next."""
    segments: list[Segment] = field(default_factory=list)
    contexts: list[RowContext] = field(default_factory=list)
    """Prompts of the training rows after the first."""
    prompt_segments: int = 1
    prompt_length: int = 0
    """Tokens at the start of `context` that are the prompt of its training row."""
    prompt_truncated: bool = False
    images: dict[str, ImagePart] = field(default_factory=dict)
    """By SHA-256, those that segments stand for."""
    calls: list[CallRecord] = field(default_factory=list)
    summary_due: bool = False
    """The model was asked for a summary of its context."""
    turns_started: int = 0
    """Turns of the model that were there when it started (`take_up`)."""
    fault: Fault | None = None
    calling: bool = False
    """A call is under way, of which the tool server may keep state though nobody waits for its answer any more."""
    verdict: Verdict | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    generate_seconds: float = 0.0
    turn_seconds: list[float] = field(default_factory=list)
    """Of each turn that left a segment."""

    @property
    def response_length(self) -> int:
        """Tokens behind the prompt."""
        return len(self.context) - self.prompt_length

    @property
    def remaining_tokens(self) -> int | None:
        """Tokens that may still follow; None if nothing limits them."""
        response, model = self.max_response_length, self.max_model_len
        limits = [
            None if response is None else response - self.response_length,
            None if model is None else model - len(self.context),
        ]
        return min((n for n in limits if n is not None), default=None)

    @property
    def invalid_calls_in_a_row(self) -> int:
        """Calls of this agent at the end that were invalid."""
        own = [call for call in self.calls if call.agent == self.agent]
        return sum(1 for _ in itertools.takewhile(lambda call: not call.valid, reversed(own)))

    @property
    def num_subagents(self) -> int:
        """Sub-agents that the trajectory has had."""
        return sum(context.reason == DELEGATED for context in self.contexts)

    @property
    def own_segments(self) -> list[Segment]:
        """The prompt, and what was written in this agent's context."""
        behind = self.segments[self.prompt_segments :]
        return [*self.segments[: self.prompt_segments], *(each for each in behind if each.agent == self.agent)]

    @property
    def sent_calls(self) -> list[CallRecord]:
        """The calls that the tool server was sent."""
        return [call for call in self.calls if not call.local]

    @property
    def visible_images(self) -> list[ImagePart]:
        """The image of each segment that stands for one, in their order."""
        return [self.images[segment.image] for segment in self.segments if segment.image is not None]

    @property
    def has_server_state(self) -> bool:
        """Whether the tool server may hold something for this trajectory, and can be told."""
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
        """Start from the row's prompt, in which `images` stand, its head dropped down to `limit`. Raises ValueError if
        it is empty."""
        if not any(segment.tokens for segment in segments):
            raise ValueError("the prompt is empty; a model needs at least one token to continue")
        stored = segments if limit is None else cut_segments(segments, limit, "left", tokenizer)
        self.prompt_truncated = stored is not segments
        self.images |= {image.sha256: image for image in images}
        self.replace_prompt(stored)

    def take_up(self, begun: Trajectory) -> None:
        """Start behind `begun`, whose segments and calls are kept as they are. What goes with the first call of a
        trajectory is not sent again."""
        self.segments, self.calls = list(begun.segments), list(begun.calls)
        last = begun.rows[-1]
        self.context = [token for segment in last.segments for token in segment.tokens]
        self.contexts, self.row = list(begun.contexts), len(begun.contexts)
        self.prompt_segments, self.prompt_length = begun.prompt_segments, len(last.prompt_ids)
        self.prompt_truncated = begun.prompt_truncated
        self.images |= begun.images
        self.turns_started = begun.num_turns
        self.turn_seconds = list(begun.timings.turns[: self.turns_started]) or [0.0] * self.turns_started
        self.generate_seconds = sum(self.turn_seconds)
        self.started -= self.generate_seconds + sum(call.seconds for call in begun.calls)
        if begun.calls:
            for name in SENT_ONCE:
                self.extra.pop(name, None)

    def replace_prompt(self, segments: list[Segment], truncated: bool = False) -> None:
        """Let `segments` be the prompt; `truncated` if they show less than the observation that was recorded last."""
        self.segments = list(segments)
        self.context = [token for segment in segments for token in segment.tokens]
        self.prompt_segments, self.prompt_length = len(segments), len(self.context)
        if self.calls:
            self._record_visible_images(segments, truncated)

    def take(self, result: StepResult) -> list[ImagePart]:
        """The images of an answer, which its segments are to show."""
        images = [image for image in result.image or () if isinstance(image, ImagePart)]
        self.images |= {image.sha256: image for image in images}
        return images

    def start_row(self, tokens: Sequence[int], reason: str) -> None:
        """Go on in a training row of its own, behind `tokens` in place of the context so far."""
        self.contexts.append(RowContext(tuple(tokens), reason))
        self.context, self.prompt_length, self.row = list(tokens), len(tokens), len(self.contexts)

    def start_subagent(self, prompt: Segment, max_turns: int) -> TrajectoryBuilder:
        """A sub-agent that goes on from `prompt` in a row of its own. Its calls and rows are counted with these."""
        child = replace(
            self,
            max_turns=max_turns,
            segments=[prompt],
            prompt_segments=1,
            agent=self.num_subagents + 1,
            depth=self.depth + 1,
            summary_due=False,
            turns_started=0,
            generate_seconds=0.0,
            turn_seconds=[],
        )
        child.start_row(prompt.tokens, DELEGATED)
        return child

    def join_subagent(self, child: TrajectoryBuilder) -> None:
        """Take over what was written since `start_subagent`."""
        self.segments += child.segments[child.prompt_segments :]
        self.generate_seconds += child.generate_seconds
        self.calling, self.details = child.calling, child.details

    def append_generation(
        self, generation: Generation, turn: ParsedTurn, seconds: float, *, summary: bool = False
    ) -> None:
        """A turn of the model, or its `summary`, which took `seconds`. An empty one leaves no segment."""
        self.details = generation.details
        if generation.token_ids:
            log_probs = None if generation.log_probs is None else tuple(generation.log_probs)
            tokens = tuple(generation.token_ids)
            spans = None if summary else turn.call_spans
            self._append(Segment(Author.MODEL, tokens, log_probs, turn.raw_text, call_spans=spans, summary=summary))
            if not summary:
                self.turn_seconds.append(seconds)

    def append_observation(self, segments: list[Segment], truncated: bool) -> None:
        """What the model is shown of the call that was recorded last; `truncated` if that is less than all."""
        for segment in segments:
            self._append(segment)
        self._record_visible_images(segments, truncated)

    def _append(self, segment: Segment) -> None:
        self.segments.append(replace(segment, row=self.row, agent=self.agent) if self.contexts else segment)
        self.context.extend(segment.tokens)

    def _record_visible_images(self, segments: list[Segment], truncated: bool) -> None:
        self.calls[-1] = replace(self.calls[-1], visible_tokens=tool_tokens(segments), truncated=truncated)

    def record(self, action: Action, result: StepResult, seconds: float, *, local: bool = False) -> None:
        """One action and its answer, the loop's own if `local`. What a tool took, though no format finds a call in it,
        is a tag of the tool's."""
        in_use = result.valid and result.fault is None
        calls = parsed_calls(action.sent_calls if in_use else action.calls)
        self.calls.append(
            CallRecord(
                step=len(self.sent_calls),
                action=action.text,
                observation=without_surrogates(result.observation),
                valid=in_use,
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
            )
        )

    def finished(self, stop: StopReason, options: EpisodeOptions) -> Trajectory:
        """The trajectory as it is now."""
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
            return None if self._is_policy_induced() else Excluded.FAULT
        if stop is StopReason.ABORTED:
            return Excluded.ABORTED
        if options.mask_overlong_loss and stop.overlong:
            return Excluded.OVERLONG
        if options.mask_void_traj and self._is_void(options):
            return Excluded.VOID
        return None

    def _is_policy_induced(self) -> bool:
        """The model's own call may be why it faulted: were that excused, a policy would learn to make such calls."""
        fault = self.calls[-1].fault if self.calls else None
        return fault is not None and fault.kind.provokable

    def _is_void(self, options: EpisodeOptions) -> bool:
        written = "".join(s.text for s in self.segments if s.is_turn)
        answered = any(marker in written for marker in options.answer_markers)
        return not answered and not any(call.valid for call in self.calls)


def cut_segments(segments: list[Segment], room: int, side: Side, tokenizer: Tokenizer) -> list[Segment]:
    """At most `room` tokens of `segments`, the tokens at `side` dropped; an image is kept or dropped whole."""
    if sum(len(segment.tokens) for segment in segments) <= room:
        return segments
    # An image is a unit, and so is each token besides.
    units: list[_Unit] = []
    for number, segment in enumerate(segments):
        parts = [(token,) for token in segment.tokens] if segment.image is None else [segment.tokens]
        units += [(segment.author, None if segment.image is None else number, part) for part in parts]
    n_head = {"left": 0, "right": room, "middle": room - room // 2}[side]
    head = fitting(units, _length, n_head)
    stored = [*head, *fitting(units[len(head) :][::-1], _length, room - n_head)[::-1]]
    cut: list[Segment] = []
    for (author, image), run in itertools.groupby(stored, key=lambda unit: unit[:2]):
        ids = tuple(token for _, _, part in run for token in part)
        cut.append(Segment(author, ids, text=tokenizer.decode(ids)) if image is None else segments[image])
    return cut


def fitting(units: Sequence[_T], size: Callable[[_T], int], room: int) -> Sequence[_T]:
    """The first of `units` that are together no larger than `room`."""
    for n, total in enumerate(itertools.accumulate(map(size, units))):
        if total > room:
            return units[:n]
    return units


def _length(unit: _Unit) -> int:
    return len(unit[2])


def tool_tokens(segments: Sequence[Segment]) -> int:
    """How many of the tokens are an observation's."""
    return sum(len(s.tokens) for s in segments if s.author is Author.TOOL)


def now() -> float:
    """Seconds on the event loop's clock."""
    return asyncio.get_running_loop().time()
