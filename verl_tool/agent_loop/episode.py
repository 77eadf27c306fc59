"""Run one trajectory of a model and its tools, over token ids.

    Episode(generator, tools, tokenizer, options).run(prompt_ids)  ->  Trajectory

Training, the eval endpoint and the notebook all use this loop. It imports neither a trainer nor an engine.

The model's tokens are never decoded and encoded again; their text is used only to find actions. At each turn the model
is fed exactly the tokens that the trajectory records.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_tool.agent_loop.actions import Action
from verl_tool.agent_loop.function_arguments import ArgumentsError
from verl_tool.agent_loop.generators.base import Generator, ImageGenerator
from verl_tool.agent_loop.generators.turn_writer import TurnWriter
from verl_tool.agent_loop.observation import ControlTokens
from verl_tool.agent_loop.observation_renderer import ObservationRenderer, renderer_for, user_renderer
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.context_policy import next_context, prompt_tokens
from verl_tool.agent_loop.prompt.opened_prompt import OpenPrompt
from verl_tool.agent_loop.prompt.subagents import answer_of, check_prompt_fits, is_delegation, is_finish, read_task
from verl_tool.agent_loop.rendering.images import ImagePlacer, ImageTokens
from verl_tool.agent_loop.rendering.observation_placer import ObservationPlacer
from verl_tool.agent_loop.tokenizer import Tokenizer, render_prompt
from verl_tool.agent_loop.tool_channel import ToolChannel, Tools
from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory
from verl_tool.agent_loop.trajectory_builder import TrajectoryBuilder, cut_segments, tool_tokens
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.formats import Format, loop_formats, rendered_markers
from verl_tool.formats.load import specs_of
from verl_tool.protocol import ENVIRONMENT_FIELD, IMAGES_FIELD, KEEP_FIELD, FaultKind, Opening, StepResult
from verl_tool.verification import AnyVerification


class Episode:
    """Runs any number of trajectories concurrently in one event loop."""

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
        """Create an Episode.

        `tools` may be None if no trajectory uses tools. `renderer` replaces the one that the options select.
        `image_tokens` says how the model reads images, and `generator` must then accept them. If it is None, the model
        reads text only and images are rejected. `formats` are the tool-call formats; None selects `options.formats`.
        Without `action_stop_tokens`, they also decide which turns contain a call.
        Raises ConfigError if the options do not fit the chat template, or a format is unknown.
        """
        self.options = options
        self._tokenizer = tokenizer
        self.formats = loop_formats(options.formats) if formats is None else tuple(formats)
        names = options.formats and [spec for fmt in self.formats for spec in specs_of(fmt)]
        self._renderer = renderer if renderer is not None else renderer_for(options, tokenizer, self.formats)
        self._image_placer = ImagePlacer(image_tokens, tokenizer) if image_tokens is not None else None
        self._writer = TurnWriter(generator, tokenizer, options, self._renderer.end_token_ids, self._image_placer)
        self._channel = ToolChannel(tools, options, names, reads_images=image_tokens is not None)
        # A format's marker may be a special token (``<response>``). The server wrote it, and has already broken up any
        # marker in a tool's output.
        control_tokens = ControlTokens(tokenizer, allowed=rendered_markers(self.formats))
        self._control_tokens = control_tokens
        self._placer = ObservationPlacer(tokenizer, control_tokens, options.truncate_obs_side, self._image_placer)
        maximum = options.max_concurrent_trajectories
        self._slots = asyncio.Semaphore(maximum) if maximum is not None else contextlib.nullcontext()

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
        verification: AnyVerification | None = None,
        partial: Trajectory | None = None,
        task_prompt: Callable[[str], Sequence[int]] | None = None,
        open_prompt: OpenPrompt | None = None,
        min_turns: int | None = None,
    ) -> Trajectory:
        """Run one trajectory from `prompt_ids` to its end. Waits for a free slot first.

        `images` has one image per placeholder (`ImageTokens.placeholder`) in `prompt_ids`; the tokens of each image
        replace its placeholder. `sampling_params` are passed to the generator, with the loop's limits and stop strings
        added. `use_tool=False` runs one turn without tools. `extra` is sent to the tools with every call, so it must
        not contain the ground truth. The prompt's images are sent with the first call unless `extra` sets
        `IMAGES_FIELD`.
        `max_turns`, `min_turns` and `max_response_length` override the options. `formats` and `renderer` override the
        Episode's, for a trajectory restricted to some tools, or whose prompt describes them.
        `verification` is sent to the tools after the trajectory has ended, unless it ended in a fault or was aborted.
        The verifier's answer is in `Trajectory.verdict`.
        If `extra` names an environment (`ENVIRONMENT_FIELD`), the trajectory begins there, and `open_prompt` renders
        what is fed to the model; `prompt_ids` are recorded if the environment cannot begin.
        `partial` is a trajectory to resume where the model's turn is next. Its tokens and calls are kept as they are,
        its turns count, and its timings are included. `prompt_ids` must be its prompt, and the tools must hold the
        state that its calls left, under `trajectory_id`.
        `task_prompt` renders the task of a sub-agent (`PromptRenderer.task_ids`). By default the task becomes a user
        message that describes no tools.

        Raises what the generator raises, except ToolFault: a fault ends the trajectory and is recorded in it. Raises
        ContentError if the prompt's images cannot be placed, and ConfigError if the Episode reads text only.
        """
        uses_tools = use_tool and self.options.enable_agent
        if uses_tools and self._channel.tools is None:
            raise ConfigError("this row uses tools and the Episode has none; give it tools, or set use_tool=False")
        if verification is not None:
            self._channel.reject_verification(verification, uses_tools)
        begins = ENVIRONMENT_FIELD in (extra or {})
        if begins:
            self._check_environment(uses_tools, open_prompt, partial)
        if images and self.options.makes_rows:
            raise ConfigError(
                f"the prompt has {len(images)} images, and context={self.options.context} with subagents="
                f"{self.options.subagents} feeds text only again; set context=append and subagents=False"
            )
        prompt = self._prompt(prompt_ids, images) if partial is None else []
        async with self._slots:
            builder = TrajectoryBuilder(
                trajectory_id or uuid.uuid4().hex,
                uses_tools,
                dict(sampling_params or {}),
                {IMAGES_FIELD: images or None, **(extra or {}), **({} if verification is None else {KEEP_FIELD: True})},
                self.options.max_turns if max_turns is None else max_turns,
                self.options.max_response_length if max_response_length is None else max_response_length,
                self.options.max_model_len,
                self.formats if formats is None else formats,
                renderer,
                task_prompt,
                self.options.min_turns if min_turns is None else min_turns,
            )
            if partial is None:
                builder.set_prompt(prompt, images, self._start_limit(), self._tokenizer)
            else:
                builder.resume(partial)
            try:
                if begins and open_prompt is not None:
                    await self._begin(builder, open_prompt)
                stop = await self._drive(builder)
                if verification is not None and stop is not StopReason.ABORTED:
                    await self._channel.verify(builder, verification)
            except ToolFault as fault:
                builder.fault, stop = fault.as_fault(), StopReason.FAULT
            except BaseException:  # cancelled, or the generator raised: the tool server must not keep the state
                self._channel.release_later(builder)
                raise
            trajectory = builder.build(stop, self.options)
        await self._channel.release(builder)
        return trajectory

    async def aclose(self) -> None:
        """Wait until the states of cancelled and failed trajectories are freed (at most `RELEASE_SECONDS`)."""
        await self._channel.aclose()

    def _prompt(self, prompt_ids: Sequence[int], images: Sequence[ImagePart]) -> list[Segment]:
        if self._image_placer is not None:
            return self._image_placer.prompt(prompt_ids, images)
        if images:
            raise ConfigError(f"the prompt has {len(images)} images, and this loop carries text only; leave them out")
        return [Segment(Author.PROMPT, tuple(prompt_ids), text=self._tokenizer.decode(prompt_ids))]

    def _check_environment(self, uses_tools: bool, open_prompt: OpenPrompt | None, partial: Trajectory | None) -> None:
        """Raise ConfigError if a trajectory cannot begin in an environment."""
        if partial is not None:
            raise ConfigError("this trajectory took place in an environment, which cannot be resumed; start it anew")
        if not uses_tools:
            raise ConfigError("this row has an environment, and uses no tools; set use_tool=True and enable_agent")
        if open_prompt is None:
            raise ConfigError("this row has an environment, whose prompt is not rendered here; send a conversation")
        if not self.options.enable_mtrl:
            raise ConfigError("an environment answers in chat turns; set enable_mtrl=True, or leave the row out")
        if self.options.call_tool_first:
            raise ConfigError("call_tool_first=True calls a tool before an environment begins; set it to False")

    # The course of a trajectory

    async def _begin(self, builder: TrajectoryBuilder, open_prompt: OpenPrompt) -> None:
        """Begin in the environment and make its prompt the trajectory's. Raises ToolFault, and what `open_prompt`
        raises."""
        opening = await self._channel.begin(builder, self._turns_left(builder, 0))
        if opening.verdict_seconds > self.options.tool_call_timeout:
            raise ConfigError(
                f"tool_call_timeout is {self.options.tool_call_timeout:g} s, and the environment's verdict may take "
                f"{opening.verdict_seconds:g} s; raise tool_call_timeout, or lower the environment's own deadline"
            )
        try:
            prompt = open_prompt(_without_control_tokens(opening, self._control_tokens))
        except Exception as error:  # a template is a program, and each trajectory may show something else
            words = f"the prompt with what the environment shows cannot be rendered: {error}"
            raise ToolFault(FaultKind.MISCONFIGURED, words, False, builder.trajectory_id) from error
        builder.formats, builder.renderer, builder.task_prompt = prompt.formats, prompt.renderer, prompt.task_prompt
        builder.every_turn = opening.every_turn
        segments = self._prompt(prompt.prompt_ids, builder.visible_images)
        builder.set_prompt(segments, builder.visible_images, self._start_limit(), self._tokenizer)

    async def _drive(self, builder: TrajectoryBuilder) -> StopReason:
        options = self.options
        if builder.uses_tools and options.call_tool_first and not builder.calls:
            over = await self._tool_first(builder)
            if over:
                return over
        remaining = builder.remaining_tokens
        if remaining is not None and remaining <= 0:
            return StopReason.MAX_RESPONSE_LENGTH
        for number in range(builder.resumed_turns, builder.max_turns + 1):
            over = await self._renew_context(builder)
            if over:
                return over
            turn, over = await self._writer.write(builder)
            builder.unsent_text = turn.text
            if over:
                return over
            is_end = bool(builder.agent) and turn.calls_tools and is_finish(turn.action)
            acts = turn.calls_tools or builder.every_turn or number < builder.min_turns
            if is_end or not (builder.uses_tools and acts):
                return StopReason.ANSWERED
            if number == builder.max_turns:
                break
            builder.unsent_text = ""
            is_last = number + 1 == builder.max_turns
            over = await self._tool_turn(builder, turn.action, self._turns_left(builder, number + 1), is_last=is_last)
            if over:
                return over
            if self._ends_with_a_call(builder) and is_last:
                break
        return StopReason.MAX_TURNS

    async def _renew_context(self, builder: TrajectoryBuilder) -> StopReason | None:
        """Start a new training row if the model is to be fed less than the whole context."""
        if builder.summary_due:
            builder.summary_due = False
            start = len(builder.segments)
            _, over = await self._writer.write(builder, summary=True)
            if over:
                return over
            summary = [token for segment in builder.segments[start:] for token in segment.tokens]
            notes = [*prompt_tokens(builder), *summary]
            renderer = user_renderer(builder.renderer or self._renderer)  # a summary has no call to answer
            behind = renderer.next(notes, [self.options.summary_continuation], ())
            builder.start_row([*notes, *(token for segment in behind for token in segment.tokens)], "summarise")
        elif (context := next_context(builder, self.options, self._tokenizer)) is not None:
            builder.start_row(context, self.options.context)
        else:
            return None
        remaining = builder.remaining_tokens
        return StopReason.MAX_RESPONSE_LENGTH if remaining is not None and remaining <= 0 else None

    def _turns_left(self, builder: TrajectoryBuilder, written: int) -> int:
        """Return how many turns the model may still write after `written` turns."""
        return builder.max_turns + int(not self._ends_with_a_call(builder)) - written

    def _ends_with_a_call(self, builder: TrajectoryBuilder) -> bool:
        """Return whether the model writes no more after its last tool turn. Where each turn is an action, a further one
        would be sent to nobody."""
        return self.options.force_finish_for_last_turn or builder.every_turn

    def _start_limit(self) -> int | None:
        limits = [n for n in (self.options.max_start_length, self.options.max_prompt_length) if n is not None]
        return min(limits, default=None)

    async def _delegate(self, builder: TrajectoryBuilder, action: Action) -> tuple[StepResult, StopReason | None]:
        """Run an action's task in a sub-agent and record its answer. Returns a stop reason if the trajectory ends."""
        stop, valid = StopReason.ANSWERED, True
        try:
            prompt = self._task_prompt(builder, read_task(action, builder, self.options))
        except ArgumentsError as error:
            answer, valid = str(error), False
        else:
            maximum = self.options.max_subagent_turns
            child = builder.start_subagent(prompt, builder.max_turns if maximum is None else maximum)
            try:
                stop = await self._drive(child)
            finally:
                builder.join_subagent(child)
            last = child.segments[-1]
            is_turn = last.author is Author.MODEL
            answer = answer_of(self._writer.parse(last.tokens, builder.formats) if is_turn else None, stop)
        observation = "".join(call.format.render(answer, call) for call in action.sent_calls)
        result = StepResult(builder.trajectory_id, observation, valid=valid)
        builder.record(action, result, 0.0, local=True)
        return result, stop if stop in (StopReason.TOOL_DONE, StopReason.ABORTED) else None

    def _task_prompt(self, builder: TrajectoryBuilder, task: str) -> Segment:
        """Render a sub-agent's prompt. Raises ArgumentsError if it is too long."""
        safe = next(self._control_tokens.escaped_forms(task))
        if builder.task_prompt is not None:
            ids = builder.task_prompt(safe)
        else:
            ids = render_prompt(self._tokenizer, [{"role": "user", "content": safe}])
        check_prompt_fits(ids, self._start_limit(), builder.max_model_len)
        return Segment(Author.PROMPT, tuple(ids))

    # Tool calls

    async def _tool_first(self, builder: TrajectoryBuilder) -> StopReason | None:
        result = await self._channel.call(builder, Action(), self._turns_left(builder, 0), is_last=False)
        if result.done:
            return StopReason.TOOL_DONE
        options = self.options
        limits = [options.max_obs_length]
        if options.max_prompt_length is not None:
            limits.append(max(0, options.max_prompt_length - len(builder.context)))
        limit = min((n for n in limits if n is not None), default=None)
        renderer = builder.renderer or self._renderer
        segments, truncated = self._placer.place(
            [result.observation],
            builder.take_images(result),
            limit,
            lambda parts: renderer.first(builder.context, parts[0]),
        )
        segments = self._with_prompt_images(builder.segments, segments)
        fitting = segments
        if options.max_prompt_length is not None:
            fitting = cut_segments(segments, options.max_prompt_length, "left", self._tokenizer)
        builder.prompt_truncated |= fitting is not segments
        builder.replace_prompt(fitting, truncated or tool_tokens(fitting) < tool_tokens(segments))
        return None

    def _with_prompt_images(self, prompt: list[Segment], segments: list[Segment]) -> list[Segment]:
        """Return `segments` with the images of `prompt`, whose tokens they begin with, split into segments again."""
        stored = list(itertools.takewhile(lambda segment: segment.author is Author.PROMPT, segments))
        own = cut_segments(prompt, sum(len(segment.tokens) for segment in stored), "right", self._tokenizer)
        return [*own, *segments[len(stored) :]]

    async def _tool_turn(
        self, builder: TrajectoryBuilder, action: Action, turns_left: int, *, is_last: bool
    ) -> StopReason | None:
        """Run one action and append its observation. Returns a stop reason if the trajectory ends."""
        if is_delegation(action, self.options):
            result, over = await self._delegate(builder, action)
            if over:
                return over
        else:
            # A sub-agent's last call is not the last call of the trajectory.
            result = await self._channel.call(builder, action, turns_left, is_last=is_last and not builder.agent)
        if result.done:
            return StopReason.TOOL_DONE
        if builder.invalid_calls_in_a_row == self.options.max_invalid_calls:
            return StopReason.INVALID_CALLS
        renderer = builder.renderer or self._renderer
        if result.role == "user":
            renderer = user_renderer(renderer)
        parts, images, limit = (
            renderer.parts(result.observation),
            builder.take_images(result),
            self.options.max_obs_length,
        )
        if images and self.options.makes_rows:
            raise ConfigError(
                f"a tool answered with an image, and context={self.options.context} with subagents="
                f"{self.options.subagents} feeds text only again; set context=append and subagents=False, or serve "
                "tools that answer in text"
            )
        segments, truncated = self._placer.place(
            parts, images, limit, lambda shown: renderer.next(builder.context, shown, action.calls)
        )
        if self.options.context == "summarise" and not is_last:
            maximum, request = self.options.context_tokens, self.options.summary_prompt
            if maximum is not None and len(builder.context) + sum(len(s.tokens) for s in segments) > maximum:
                builder.summary_due = True
                segments, truncated = self._placer.place(
                    parts,
                    images,
                    limit,
                    lambda shown: renderer.next(
                        builder.context, [*shown[:-1], f"{shown[-1]}\n\n{request}"], action.calls
                    ),
                )
        remaining = builder.remaining_tokens
        if remaining is None or sum(len(s.tokens) for s in segments) < remaining:
            builder.append_observation(segments, truncated)
            return None
        fitting = cut_segments(segments, remaining, self.options.truncate_response_side, self._tokenizer)
        builder.append_observation(fitting, truncated or tool_tokens(fitting) < tool_tokens(segments))
        return StopReason.MAX_RESPONSE_LENGTH


def _without_control_tokens(opening: Opening, control_tokens: ControlTokens) -> Opening:
    """Return `opening` with the control tokens in its texts broken up, as in observations."""

    def escape(value: Any) -> Any:
        if isinstance(value, str):
            return next(control_tokens.escaped_forms(value))
        if isinstance(value, Mapping):
            return {escape(name): escape(each) for name, each in value.items()}
        return [escape(each) for each in value] if isinstance(value, list) else value

    messages = [{**message, "content": escape(message.get("content"))} for message in opening.messages]
    read = ("name", "description", "parameters")
    tools = [tool.model_copy(update={name: escape(getattr(tool, name)) for name in read}) for tool in opening.tools]
    return opening.model_copy(update={"messages": messages, "tools": tools})
