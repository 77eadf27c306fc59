"""The loop: one trajectory of a model and its tools, over token ids.

    Episode(generator, tools, tokenizer, options).run(prompt_ids)  ->  Trajectory

Training, the eval endpoint and the notebook all drive this loop; none has another. It imports no trainer and no engine.

What the model wrote is never decoded and encoded again: text is only looked at to find actions. At each turn the model
is fed the very tokens that the trajectory records.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from verl_tool.agent_loop.actions import Action, ParsedTurn, length_to_stop, stopped_action
from verl_tool.agent_loop.generators.base import Generation, Generator, ImageGenerator
from verl_tool.agent_loop.observation import ControlTokens, truncate
from verl_tool.agent_loop.observation_renderer import ObservationRenderer, renderer_for
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.rendering.images import ImagePlacer, ImageTokens, Piece, images_in, pieces_of
from verl_tool.agent_loop.row import is_present
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory
from verl_tool.agent_loop.trajectory_builder import SENT_ONCE, TrajectoryBuilder, cut_segments, now, tool_tokens
from verl_tool.content.parts import ImagePart, parts_of, tagged, to_wire
from verl_tool.errors import ConfigError, ContentError, ToolFault
from verl_tool.formats import Format, loop_formats, rendered_markers
from verl_tool.formats.load import specs_of
from verl_tool.protocol import (
    FORMATS_FIELD,
    IMAGES_FIELD,
    KEEP_FIELD,
    TURNS_LEFT_FIELD,
    VERIFY_FIELD,
    Fault,
    FaultKind,
    StepResult,
)
from verl_tool.verification import MARGIN_SECONDS, Verdict, Verification

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""A tool call's own deadline has this long to answer before the loop gives it up."""
RELEASE_SECONDS = 10.0
"""Deadline of telling the tool server that a trajectory is over."""


class Tools(Protocol):
    """What the loop asks of the tools. `verl_tool.client.ToolClient` is one.

    Retries are its business, never the loop's: two layers of retries would multiply.
    """

    async def call(
        self,
        trajectory_id: str,
        action: str,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        finish: bool = False,
        is_last_step: bool = False,
    ) -> StepResult:
        """The answer to one action. A failure of the infrastructure is in `StepResult.fault`, or raised as ToolFault.

        With `finish`, the trajectory is over and its state may be freed; the action is not run.
        """
        ...


class Episode:
    """Runs trajectories, any number at once, within one event loop."""

    def __init__(
        self,
        generator: Generator | ImageGenerator,
        tools: Tools | None,
        tokenizer: Tokenizer,
        options: EpisodeOptions,
        *,
        renderer: ObservationRenderer | None = None,
        formats: Sequence[Format] | None = None,
        image_tokens: ImageTokens | None = None,
    ) -> None:
        """`tools` may be None if nothing calls one. `renderer` replaces the one that the options name. `image_tokens`:
        how the model reads images; `generator` takes them then. None: it reads text only, and images are refused.

        `formats` are those in which the model calls. They find the calls in turns that no stop string ends
        (`action_stop_tokens` is empty), and what is told of a call. None: those that `options.formats` names.
        Raises ConfigError if options and chat template do not go together, or a format is unknown.
        """
        self.options = options
        self._generator, self._tools, self._tokenizer = generator, tools, tokenizer
        self.formats = loop_formats(options.formats) if formats is None else tuple(formats)
        named = options.formats and [spec for fmt in self.formats for spec in specs_of(fmt)]
        self._warned_of_formats = {FORMATS_FIELD: named} if named else {}
        self._renderer = renderer if renderer is not None else renderer_for(options, tokenizer, self.formats)
        self._end_token_ids = self._renderer.end_token_ids | tokenizer.eos_token_ids
        self._stop_token_ids = sorted(self._end_token_ids - tokenizer.eos_token_ids)
        # A format's own marker may be a special token (``<response>``): the server wrote it, and broke up those that a
        # tool's output held.
        self._control_tokens = ControlTokens(tokenizer, allowed=rendered_markers(self.formats))
        self._placer = ImagePlacer(image_tokens, tokenizer) if image_tokens is not None else None
        maximum = options.max_concurrent_trajectories
        self._places = asyncio.Semaphore(maximum) if maximum is not None else contextlib.nullcontext()
        self._releases: set[asyncio.Task[None]] = set()
        self._answered_in_text = False
        """Some call was."""

    async def run(
        self,
        prompt_ids: Sequence[int],
        *,
        images: Sequence[ImagePart] = (),
        sampling_params: Mapping[str, Any] | None = None,
        trajectory_id: str | None = None,
        use_tool: bool = True,
        extra: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        max_response_length: int | None = None,
        formats: Sequence[Format] | None = None,
        renderer: ObservationRenderer | None = None,
        verification: Verification | None = None,
        begun: Trajectory | None = None,
    ) -> Trajectory:
        """One trajectory from `prompt_ids` to its end. Waits for a free place first.

        `images`: one for each placeholder (`ImageTokens.placeholder`) in `prompt_ids`, in their order; the tokens of
        each take the placeholder's place. `sampling_params` reach the generator, with the loop's own limits and stop
        strings added. `use_tool=False` gives one turn without tools. `extra` is sent to the tools with every call: put
        no gold answer into it. The prompt's images go with the first call, if `extra` has none of its own
        (`IMAGES_FIELD`).
        `max_turns` and `max_response_length` are this trajectory's own, in place of those of the options; `formats` and
        `renderer`, in place of the Episode's, if it may use some of the tools only, or its prompt tells of them.
        `verification` is sent to the tools once the trajectory has ended, unless by a fault or aborted; what the
        verifier said is in `Trajectory.verdict`.
        `begun`: a trajectory up to where the model has its turn, from which this one goes on, with its tokens as they
        are, its calls, and the turns that they have used up; `prompt_ids` are its prompt then. The tools must have the
        state that its calls left, under `trajectory_id`. The timings begin with those
        of its record.

        Raises what the generator raises, ToolFault excepted: a fault ends the trajectory and is in it. Raises
        ContentError if the prompt's images cannot be placed, and ConfigError if the Episode reads text only.
        """
        uses_tools = use_tool and self.options.enable_agent
        if uses_tools and self._tools is None:
            raise ConfigError("this row uses tools and the Episode has none; give it tools, or set use_tool=False")
        if verification is not None:
            self._reject_verification(verification, uses_tools)
        prompt = self._prompt(prompt_ids, images) if begun is None else []
        async with self._places:
            builder = TrajectoryBuilder(
                trajectory_id or uuid.uuid4().hex,
                uses_tools,
                dict(sampling_params or {}),
                {IMAGES_FIELD: images or None, **(extra or {}), **({} if verification is None else {KEEP_FIELD: True})},
                self.options.max_turns if max_turns is None else max_turns,
                self.options.max_response_length if max_response_length is None else max_response_length,
                self.formats if formats is None else formats,
                renderer,
            )
            if begun is None:
                builder.set_prompt(prompt, images, self._start_limit(), self._tokenizer)
            else:
                builder.take_up(begun)
            try:
                stop = await self._drive(builder)
                if verification is not None and stop is not StopReason.ABORTED:
                    await self._verify(builder, verification)
            except ToolFault as fault:
                builder.fault, stop = fault.as_fault(), StopReason.FAULT
            except BaseException:  # cancelled, or the generator raised: the tool server must not keep the state
                self._release_later(builder)
                raise
            trajectory = builder.finished(stop, self.options)
        await self._release(builder)
        return trajectory

    async def aclose(self) -> None:
        """Wait until the states of cancelled and failed trajectories are freed (at most `RELEASE_SECONDS`)."""
        if self._releases:
            await asyncio.wait(set(self._releases))

    def _prompt(self, prompt_ids: Sequence[int], images: Sequence[ImagePart]) -> list[Segment]:
        if self._placer is not None:
            return self._placer.prompt(prompt_ids, images)
        if images:
            raise ConfigError(f"the prompt has {len(images)} images, and this loop carries text only; leave them out")
        return [Segment(Author.PROMPT, tuple(prompt_ids), text=self._tokenizer.decode(prompt_ids))]

    # The course of a trajectory

    async def _drive(self, builder: TrajectoryBuilder) -> StopReason:
        options = self.options
        if builder.uses_tools and options.call_tool_first and not builder.calls:
            over = await self._tool_first(builder)
            if over:
                return over
        remaining = self._remaining_tokens(builder)
        if remaining is not None and remaining <= 0:
            return StopReason.MAX_RESPONSE_LENGTH
        for number in range(builder.turns_started, builder.max_turns + 1):
            turn, over = await self._model_turn(builder)
            if over:
                return over
            if not (builder.uses_tools and (turn.calls_tools or number < options.min_turns)):
                return StopReason.ANSWERED
            if number == builder.max_turns:
                break
            is_last = number + 1 == builder.max_turns
            over = await self._tool_turn(builder, turn.action, self._turns_left(builder, number + 1), is_last=is_last)
            if over:
                return over
            if options.force_finish_for_last_turn and is_last:
                break
        return StopReason.MAX_TURNS

    def _turns_left(self, builder: TrajectoryBuilder, written: int) -> int:
        """Turns that the model may still write when it has `written` so many."""
        return builder.max_turns + int(not self.options.force_finish_for_last_turn) - written

    def _start_limit(self) -> int | None:
        limits = [n for n in (self.options.max_start_length, self.options.max_prompt_length) if n is not None]
        return min(limits, default=None)

    # The model's part

    async def _model_turn(self, builder: TrajectoryBuilder) -> tuple[ParsedTurn, StopReason | None]:
        """Generate and append one turn."""
        params = self._sampling_params(builder)
        maximum: int | None = params.get("max_tokens")
        started = now()
        try:
            images: dict[str, Any] = {"images": visible} if (visible := builder.visible_images) else {}
            generation = await asyncio.wait_for(
                self._generator.generate(list(builder.context), params, builder.trajectory_id, **images),
                self.options.generation_timeout,
            )
        except ContentError as error:
            raise ToolFault(FaultKind.TOOL_CRASHED, str(error), retryable=False) from error
        except asyncio.TimeoutError:
            raise ToolFault(
                FaultKind.TIMEOUT,
                f"the model wrote no turn within generation_timeout={self.options.generation_timeout} s; "
                "raise it, or look at the engine",
                retryable=False,
            ) from None
        finally:
            seconds = now() - started
            builder.generate_seconds += seconds
        _check(generation, maximum)
        if self._placer is not None and not set(self._placer.tokens.banned_ids).isdisjoint(generation.token_ids):
            words = "the model wrote a token that stands for a part of an image; have the engine never sample it"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        generation = up_to_stop(generation, params, self._tokenizer)
        turn = self._parse(generation.token_ids, builder.formats)
        builder.append_generation(generation, turn, seconds)
        if generation.stop_reason == "aborted":
            return turn, StopReason.ABORTED
        return turn, self._cut(builder, generation, turn, maximum)

    def _sampling_params(self, builder: TrajectoryBuilder) -> dict[str, Any]:
        params = dict(builder.sampling_params)
        limits = [params.get("max_tokens"), self.options.max_action_length, self._remaining_tokens(builder)]
        maximum = min((n for n in limits if n is not None), default=None)
        if maximum is not None:
            params["max_tokens"] = maximum
        stops = self._stops(builder)
        if stops:
            params["stop"] = stops
            params["include_stop_str_in_output"] = True
            # A stop string may be a special token, which engines do not look for if they leave it out of the text.
            params["skip_special_tokens"] = False
        if self._stop_token_ids:
            params["stop_token_ids"] = sorted({*(params.get("stop_token_ids") or ()), *self._stop_token_ids})
        return params

    def _stops(self, builder: TrajectoryBuilder) -> list[str]:
        """Strings at which a turn ends: the caller's own and those of actions."""
        own = builder.sampling_params.get("stop") or ()
        return [
            *([own] if isinstance(own, str) else own),
            *(self.options.action_stop_tokens if builder.uses_tools else ()),
        ]

    def _remaining_tokens(self, builder: TrajectoryBuilder) -> int | None:
        """Tokens that may still follow; None if nothing limits them."""
        response, model = builder.max_response_length, self.options.max_model_len
        rooms = [
            None if response is None else response - builder.response_length,
            None if model is None else model - len(builder.context),
        ]
        return min((n for n in rooms if n is not None), default=None)

    def _parse(self, token_ids: Sequence[int], formats: Sequence[Format]) -> ParsedTurn:
        n = len(token_ids)
        while n and token_ids[n - 1] in self._end_token_ids:
            n -= 1
        text = self._tokenizer.decode(token_ids[:n])
        raw_text = self._tokenizer.decode(token_ids) if n < len(token_ids) else text
        return ParsedTurn.parse(text, raw_text, self.options.action_stop_tokens, formats)

    def _cut(
        self, builder: TrajectoryBuilder, generation: Generation, turn: ParsedTurn, most: int | None
    ) -> StopReason | None:
        """The limit that cut the model's turn before its end, if one did."""
        full = generation.stop_reason == "length" or (most is not None and len(generation.token_ids) >= most)
        complete = turn.text != turn.raw_text or stopped_action(turn.raw_text, self._stops(builder)) is not None
        if not full or complete or generation.stop_reason == "stop":
            return None
        remaining = self._remaining_tokens(builder)
        # Below the limit that the loop set, it was the engine's own: what its context window holds.
        window_full = most is None or len(generation.token_ids) < most
        if window_full or (remaining is not None and remaining <= 0):
            return StopReason.MAX_RESPONSE_LENGTH
        return StopReason.MAX_ACTION_LENGTH

    # The tools' part

    async def _tool_first(self, builder: TrajectoryBuilder) -> StopReason | None:
        result = await self._call(builder, Action(), self._turns_left(builder, 0), is_last=False)
        if result.done:
            return StopReason.TOOL_DONE
        options = self.options
        limits = [options.max_obs_length]
        if options.max_prompt_length is not None:
            limits.append(max(0, options.max_prompt_length - len(builder.context)))
        limit = min((n for n in limits if n is not None), default=None)
        renderer = builder.renderer or self._renderer
        segments, truncated = self._placed(
            [result.observation], builder.take(result), limit, lambda parts: renderer.first(builder.context, parts[0])
        )
        segments = self._with_prompt_images(builder.segments, segments)
        fitting = segments
        if options.max_prompt_length is not None:
            fitting = cut_segments(segments, options.max_prompt_length, "left", self._tokenizer)
        builder.prompt_truncated |= fitting is not segments
        builder.replace_prompt(fitting, truncated or tool_tokens(fitting) < tool_tokens(segments))
        return None

    def _with_prompt_images(self, prompt: list[Segment], segments: list[Segment]) -> list[Segment]:
        """`segments`, which begin with the tokens of `prompt` in one, with its images told apart again."""
        stored = list(itertools.takewhile(lambda segment: segment.author is Author.PROMPT, segments))
        own = cut_segments(prompt, sum(len(segment.tokens) for segment in stored), "right", self._tokenizer)
        return [*own, *segments[len(stored) :]]

    async def _tool_turn(
        self, builder: TrajectoryBuilder, action: Action, turns_left: int, *, is_last: bool
    ) -> StopReason | None:
        """Run one action and append what it gave. A reason, if the trajectory ends there."""
        result = await self._call(builder, action, turns_left, is_last=is_last)
        if result.done:
            return StopReason.TOOL_DONE
        renderer = builder.renderer or self._renderer
        parts = renderer.parts(result.observation)
        segments, truncated = self._placed(
            parts,
            builder.take(result),
            self.options.max_obs_length,
            lambda shown: renderer.next(builder.context, shown, action.calls),
        )
        remaining = self._remaining_tokens(builder)
        if remaining is None or sum(len(s.tokens) for s in segments) < remaining:
            builder.append_observation(segments, truncated)
            return None
        fitting = cut_segments(segments, remaining, self.options.truncate_response_side, self._tokenizer)
        builder.append_observation(fitting, truncated or tool_tokens(fitting) < tool_tokens(segments))
        return StopReason.MAX_RESPONSE_LENGTH

    async def _call(self, builder: TrajectoryBuilder, action: Action, turns_left: int, *, is_last: bool) -> StepResult:
        """The answer to one action, recorded. Raises ToolFault if there is none."""
        started = now()
        builder.calling = True
        result = await self._ask(builder, action.text, turns_left, is_last)
        builder.calling = False
        seconds = now() - started
        result = self._readable(action, result)
        builder.record(action, result, seconds)
        if result.fault is not None:
            fault = result.fault
            raise ToolFault(fault.kind, fault.message, fault.retryable, builder.trajectory_id)
        return result

    def _readable(self, action: Action, result: StepResult) -> StepResult:
        """The answer with its images as parts, as many as its text has tags, and without what the model cannot read,
        which is an image if it reads text only, and audio; the model, the record and the metrics are told.

        Raises ConfigError if no call was ever answered in what it reads: then the tools are of no use here. Later an
        image is a model's doing, and a model must not be able to end the run. Raises ToolFault for an image that cannot
        be read.
        """
        image = ("an image", None if self._placer else result.image)
        media = [name for name, held in (image, ("audio", result.audio)) if is_present(held)]
        if not media:
            self._answered_in_text |= result.valid and result.fault is None
            return result if self._placer is None else _with_images(result)
        carried = "text" if self._placer is None else "text and images"
        description = f"{_tool_in(action)} answered with {' and '.join(media)}, and this loop carries {carried} only"
        if not self._answered_in_text:
            raise ConfigError(
                f"{description}: the model would go on without having seen it. Serve tools that answer in text"
            )
        logger.warning("%s: it was left out, and the model told so", description)
        left = replace(
            result,
            observation=f"{result.observation}[{' and '.join(media)} was left out: only {carried} can be read here]",
            image=None if self._placer is None else result.image,
            audio=None,
            metrics={**(result.metrics or {}), "error": 1.0, "media_excluded": 1.0},
        )
        return left if self._placer is None else _with_images(left)

    async def _verify(self, builder: TrajectoryBuilder, verification: Verification) -> None:
        """Have the verifier look at the workspace, and note what it said. The model is not told of any of it."""
        started = now()
        builder.calling = True  # a state is left, even if a call has ended the trajectory
        builder.extra[VERIFY_FIELD] = verification.model_dump(mode="json")
        result = await self._ask(builder, "", 0, True)
        builder.verdict = Verdict(
            result.reward if result.fault is None else None,
            result.observation,
            dict(result.metrics or {}),
            result.fault,
            now() - started,
        )

    def _reject_verification(self, verification: Verification, uses_tools: bool) -> None:
        if not uses_tools:
            raise ConfigError(
                "this row is verified in a workspace, and uses no tools; set use_tool=True and enable_agent"
            )
        minimum = verification.timeout_seconds + MARGIN_SECONDS
        if self.options.tool_call_timeout < minimum:
            raise ConfigError(
                f"tool_call_timeout is {self.options.tool_call_timeout:g} s, and this row's verifier may take "
                f"{verification.timeout_seconds:g} s; set tool_call_timeout to {minimum:g} or more"
            )

    async def _ask(self, builder: TrajectoryBuilder, action: str, turns_left: int, is_last: bool) -> StepResult:
        assert self._tools is not None  # run() refuses a row that uses tools without any
        once = {name: builder.extra.pop(name, None) for name in SENT_ONCE}
        once[IMAGES_FIELD] = await _sent(once[IMAGES_FIELD])
        first = {name: value for name, value in once.items() if value is not None}
        deadline = self.options.tool_call_timeout + GRACE_SECONDS
        try:
            return await asyncio.wait_for(
                self._tools.call(
                    builder.trajectory_id,
                    action,
                    step=len(builder.calls),
                    extra={**builder.extra, **first, **self._warned_of_formats, TURNS_LEFT_FIELD: turns_left},
                    is_last_step=is_last,
                ),
                deadline,
            )
        except asyncio.TimeoutError:
            message = f"no answer within tool_call_timeout={self.options.tool_call_timeout} s (+{GRACE_SECONDS} s)"
            fault = Fault(kind=FaultKind.TIMEOUT, message=message, retryable=False)
        except ToolFault as raised:
            fault = raised.as_fault()
        return StepResult(builder.trajectory_id, fault=fault)

    def _placed(
        self,
        parts: Sequence[str],
        images: Sequence[ImagePart],
        limit: int | None,
        place: Callable[[list[str]], list[Segment]],
    ) -> tuple[list[Segment], bool]:
        """The segments that `place` makes of an observation's parts, free of control tokens, and whether `limit`, of
        which each part has its share, cut one. `images`: those that tags in the parts stand for.

        Raises ToolFault if the segments do not hold as many images.
        """
        if self._placer is not None and images:
            return self._placed_with_images(self._placer, pieces_of(parts, images), limit, place)
        side, share = self.options.truncate_obs_side, None if limit is None else limit // len(parts)
        for safe in zip(*map(self._control_tokens.escaped_forms, parts), strict=True):
            visible = [each if share is None else truncate(each, share, side, self._tokenizer) for each in safe]
            segments = place(visible)
            if not self._control_tokens.forged(segments):
                break
        return segments, visible != list(safe)

    def _placed_with_images(
        self,
        placer: ImagePlacer,
        parts: Sequence[Sequence[Piece]],
        limit: int | None,
        place: Callable[[list[str]], list[Segment]],
    ) -> tuple[list[Segment], bool]:
        """As `_placed`; only texts are made safe, and images are kept or dropped whole."""
        side, share = self.options.truncate_obs_side, None if limit is None else limit // len(parts)
        for safe in zip(*map(self._escaped_forms, parts), strict=True):
            try:
                visible = [list(each) if share is None else placer.truncated(each, share, side) for each in safe]
                segments = placer.placed(place([placer.text_of(each) for each in visible]), images_in(visible))
            except ContentError as error:
                raise ToolFault(FaultKind.TOOL_CRASHED, str(error), retryable=False) from error
            if segments is not None and not self._control_tokens.forged(s for s in segments if s.image is None):
                return segments, visible != [list(each) for each in safe]
        message = (
            f"the observation's {len(images_in(parts))} images are not where the chat template should have left them; "
            "set another mtrl_role, or mtrl_sep"
        )
        raise ToolFault(FaultKind.MISCONFIGURED, message, retryable=False)

    def _escaped_forms(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, ...]]:
        """As those of `ControlTokens`, of the texts among the pieces."""
        forms = [
            self._control_tokens.escaped_forms(piece) if isinstance(piece, str) else itertools.repeat(piece)
            for piece in ("", *pieces)  # one is a text at least, whose forms come to an end
        ]
        return (form[1:] for form in zip(*forms, strict=False))

    async def _release(self, builder: TrajectoryBuilder) -> None:
        """Let the tool server free what it holds for a trajectory. The server forgets it by itself in time."""
        if self._tools is None or not builder.has_server_state:
            return
        try:
            await asyncio.wait_for(self._tools.call(builder.trajectory_id, "", finish=True), RELEASE_SECONDS)
        except (asyncio.TimeoutError, ToolFault) as error:
            logger.debug("the tool server was not told that trajectory %s is over: %s", builder.trajectory_id, error)

    def _release_later(self, builder: TrajectoryBuilder) -> None:
        task = asyncio.get_running_loop().create_task(self._release(builder))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)


async def _sent(images: object) -> object:
    """What the tools are sent of a prompt's images. What is no part already is sent as it is."""
    parts = images if isinstance(images, (list, tuple)) else ()
    if not any(isinstance(part, ImagePart) for part in parts):
        return images
    return await asyncio.to_thread(lambda: [to_wire(part) if isinstance(part, ImagePart) else part for part in parts])


def _with_images(result: StepResult) -> StepResult:
    """The answer with its images as parts, as many as its text has tags. Raises ToolFault if one cannot be read."""
    if not is_present(result.image):
        return replace(result, image=None)
    try:
        text, images, _ = tagged(parts_of(result.observation, result.image))
    except ContentError as error:
        raise ToolFault(FaultKind.TOOL_CRASHED, str(error), False, result.trajectory_id) from error
    return replace(result, observation=text, image=images)


def _tool_in(action: Action) -> str:
    """The tool that an action calls, for a message."""
    names = [call.name for call in action.sent_calls if call.name]
    return f"the tool {names[0]!r}" if names else f"the tool that was called by {action.text[-200:]!r}"


def up_to_stop(generation: Generation, sampling_params: Mapping[str, Any], tokenizer: Tokenizer) -> Generation:
    """The turn without what stands behind the token that completes the first of the stop strings asked for."""
    stop = sampling_params.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    n = length_to_stop(generation.token_ids, stops, tokenizer, int(sampling_params.get("min_tokens") or 0))
    return generation if n is None else generation.cut(n)


def _check(generation: Generation, most: int | None) -> None:
    """Raise ValueError if a generator does not keep its promise: the masks would be wrong from here on."""
    n = len(generation.token_ids)
    if generation.log_probs is not None and len(generation.log_probs) != n:
        raise ValueError(f"the generator gave {n} tokens and {len(generation.log_probs)} log-probabilities")
    if most is not None and n > most:
        raise ValueError(f"the generator gave {n} tokens for max_tokens={most}")
