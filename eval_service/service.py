"""The loop of training behind an API: one answer, one trajectory."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eval_service.engines.base import Engine
from eval_service.engines.watched_engine import WatchedEngine
from eval_service.episode_adapter import EpisodeAdapter, StreamObserver
from eval_service.openai.errors import bad_request, from_fault, overloaded
from eval_service.openai.image_reader import ImageReader
from eval_service.settings import Sampling
from verl_tool.agent_loop.actions import LoopFormats
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.observation_renderer import ObservationRenderer, renderer_for
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.opened_prompt import OpenPrompt, PromptOpener
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.rendering.images import ImagePlacer, ImageTokens
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.tool_channel import RELEASE_SECONDS
from verl_tool.agent_loop.trajectory import StopReason, Trajectory
from verl_tool.client import ToolClient
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ContentError, ToolFault
from verl_tool.formats import Format, loop_formats
from verl_tool.http.messages import HttpError
from verl_tool.protocol import FaultKind, ToolDescription
from verl_tool.servers.execution.admission import Admission
from verl_tool.util.json_text import excerpt
from verl_tool.verification import AnyVerification

log = logging.getLogger(__name__)

TOOLS_KNOWN_SECONDS = 30.0
"""How long the list of the tool server's tools is believed."""
QUICK_SECONDS = 5.0
"""For that list, where a request can be answered without it."""
CHARACTERS_A_TOKEN = 16
"""More than texts have on average in any language; a prompt with more than that for each token is not read."""
MODEL_PLACE = "model"
"""Name under which trajectories wait for a place."""


@dataclass(frozen=True)
class GenerationJob:
    trajectory_id: str
    prompt_ids: Sequence[int]
    images: tuple[ImagePart, ...] = ()
    """Of the prompt, one for each placeholder in it."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    token_limit: int | None = None
    """Most tokens that the model writes."""
    tool_names: tuple[str, ...] | None = None
    """The only tools that may be used. None: all; none of them: no tool at all."""
    formats: tuple[Format, ...] | None = None
    """Those in which it calls them (`Service.formats_of`). None: those that the options name."""
    renderer: ObservationRenderer | None = None
    """Appends observations behind the prompt (`PromptRenderer.observations`). None: as where no tools are listed."""
    max_turns: int | None = None
    """Most tool turns. None: the option's."""
    min_turns: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Sent to the tools with every call, files with the first."""
    verification: AnyVerification | None = None
    """Run in the workspace that the trajectory leaves, or sent to its environment."""
    task_prompt: Callable[[str], Sequence[int]] | None = None
    """As of `Episode.run`."""
    open_prompt: OpenPrompt | None = None
    """As of `Episode.run`."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Kept in the trajectory's `extra`."""


class Service:
    """A model, its tools, and the loop that joins them.

    `max_queued`: answers that wait for a place before more are refused; there are `max_concurrent_trajectories` places.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        tools: ToolClient | None,
        options: EpisodeOptions,
        *,
        sampling: Sampling | None = None,
        max_queued: int = 8192,
        formats: Sequence[Format] | None = None,
        tool_descriptions: Sequence[ToolDescription] | None = None,
        image_tokens: ImageTokens | None = None,
        image_reader: ImageReader | None = None,
        why_no_images: str = "reads text only",
    ) -> None:
        """`image_tokens`: how the model reads images, and `image_reader` how those of requests are; without
        `image_tokens` they are refused, and `why_no_images` says what the model does. `tool_descriptions`: what the
        server told of its tools, as a run stored it; None: what it says of them now.
        `formats`: those in which tools are called, in place of those that the options name and the server tells.

        Raises ConfigError if options and chat template do not go together.
        """
        self.engine: Engine = WatchedEngine(engine)
        self.tokenizer, self.tools, self.options = tokenizer, tools, options
        self.sampling = sampling or Sampling()
        self.image_tokens, self.why_no_images = image_tokens, why_no_images
        self.image_reader = image_reader or ImageReader()
        self._placer = None if image_tokens is None else ImagePlacer(image_tokens, tokenizer)
        self.formats = loop_formats(options.formats) if formats is None else tuple(formats)
        self.admission = Admission(options.max_concurrent_trajectories or max_queued, max_queued)
        # What is told is known here of a run; else the first request asks for it.
        self._prompts = PromptRenderer(tokenizer, options, tool_descriptions, formats) if tool_descriptions else None
        self._renderer: ObservationRenderer = (
            self._prompts.observations() if self._prompts else renderer_for(options, tokenizer, self.formats)
        )
        self.end_token_ids = self._renderer.end_token_ids | tokenizer.eos_token_ids
        self._extra_formats = formats
        self._loop_formats: tuple[tuple[ToolDescription, ...], LoopFormats] | None = None
        self._opener: tuple[tuple[ToolDescription, ...], PromptOpener] | None = None
        self._tool_descriptions = None if tool_descriptions is None else tuple(tool_descriptions)
        self._known_tools: tuple[ToolDescription, ...] = ()
        self._known_until = self._silent_until = 0.0
        self._asking = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def session_formats(self) -> tuple[Format, ...]:
        """The formats in which agents' sessions find calls: in training, those of the run's tools are among them."""
        if self._extra_formats is not None:
            return self.formats
        return loop_formats(self.options.formats, self._tool_descriptions or ())

    @property
    def uses_tools(self) -> bool:
        return self.options.enable_agent and self.tools is not None

    def check_prompt(
        self, prompt_ids: Sequence[int], param: str, described_tools: int = 0, images: Sequence[ImagePart] = ()
    ) -> None:
        """Raises HttpError if the prompt leaves no room for an answer, the loop would cut it, it has not one place for
        each of its images, or the model does not know one of its tokens. `described_tools`: the number
        of tools that it describes."""
        n = len(prompt_ids) + self._further_tokens(prompt_ids, images, param)
        if n == 0:
            raise bad_request(f"'{param}' is empty; a model needs at least one token to continue", param=param)
        limits = {
            "max_model_len": self.engine.max_model_len - 1,
            "max_prompt_length": self.options.max_prompt_length,
            "max_start_length": self.options.max_start_length,
        }
        for name, limit in limits.items():
            if limit is not None and n > limit:
                about = f", what it tells of {described_tools} tool(s) included" if described_tools else ""
                about += f", {len(images)} image(s) included" if images else ""
                message = (
                    f"the prompt has {n} tokens{about}; this model takes at most {limit} here ({name}). Shorten it"
                )
                raise bad_request(message, param=param, code="context_length_exceeded")
        last = self.engine.vocab_size - 1
        for token_id in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token_id <= last:
                message = (
                    f"'{param}' holds the token id {excerpt(token_id)}; this model's vocabulary is from 0 to {last}"
                )
                raise bad_request(message, param=param, code="invalid_value")

    def _further_tokens(self, prompt_ids: Sequence[int], images: Sequence[ImagePart], param: str) -> int:
        """How many tokens more than placeholders the images have. Raises HttpError."""
        if self._placer is None:
            return 0
        try:
            self._placer.check_prompt(prompt_ids, images)
            return self._placer.further_tokens(images)
        except ContentError as error:
            raise bad_request(str(error), param=param, code="invalid_image") from None

    def check_prompt_size(self, characters: int, param: str) -> None:
        """Raises HttpError if a text cannot be a prompt that fits, so that nobody makes tokens of it to find out."""
        limit = self.engine.max_model_len * CHARACTERS_A_TOKEN
        if characters > limit:
            message = (
                f"the prompt has {characters} characters; this service takes at most {limit}, {CHARACTERS_A_TOKEN} for "
                f"each of the {self.engine.max_model_len} tokens of its context. Shorten it"
            )
            raise bad_request(message, param=param, code="context_length_exceeded")

    async def prompts(self, listed: Sequence[str] | None) -> PromptRenderer:
        """Makes prompts as the training does, for requests that list these tools (None: no list). Raises HttpError if
        the tools must be known and the tool server does not answer."""
        if not (self.uses_tools and (self.options.describes_tools or listed)):
            return self._prompts_without_tools
        known = self._tool_descriptions or await self._tools_known()
        if self._prompts is None or self._prompts.served_tools != known:
            self._prompts = PromptRenderer(self.tokenizer, self.options, known, self._extra_formats)
        return self._prompts

    @functools.cached_property
    def _prompts_without_tools(self) -> PromptRenderer:
        return PromptRenderer(self.tokenizer, self.options, formats=self._extra_formats)

    async def prompt_opener(self) -> PromptOpener:
        """Renders prompts of conversations that begin in environments. Raises HttpError as `prompts`."""
        known = self._tool_descriptions or await self._tools_known()
        if self._opener is None or self._opener[0] != known:
            prompts = PromptRenderer(self.tokenizer, self.options, known, self._extra_formats)
            found = LoopFormats(self.options.formats, known)
            own = self._extra_formats
            self._opener = known, PromptOpener(prompts, lambda listed: found.of(listed) if own is None else own)
        return self._opener[1]

    async def formats_of(self, names: Sequence[str] | None) -> tuple[Format, ...]:
        """The formats in which a trajectory calls tools that may use those of `names` only (None: all)."""
        if self._extra_formats is not None or self.options.formats is not None or not self.uses_tools or names == ():
            return self.formats
        known = await self._fetch_tools() if self._tool_descriptions is None else self._tool_descriptions
        if self._loop_formats is None or self._loop_formats[0] != known:
            self._loop_formats = known, LoopFormats(None, known)
        return self._loop_formats[1].of(names)

    def listed_tools(self, names: Sequence[str] | None) -> Sequence[str] | None:
        """Those of a request's tools that its trajectory may use; None: it does not say."""
        return names if self.uses_tools else ()

    async def check_tool_names(self, names: Sequence[str] | None) -> None:
        """Raises HttpError if a tool is asked for that the tool server does not have, or that cannot be asked."""
        if not names:
            return
        known = [tool.name for tool in await self._tools_known()]
        for name in names:
            if name not in known:
                message = f"tool {name[:80]!r} is unknown; known: {', '.join(known) or 'none'}"
                raise bad_request(message, param="tools", code="unknown_tool")

    async def check_tools(self) -> None:
        """Raises ToolFault if the tool server does not answer, or says that it is unwell."""
        if not self.uses_tools or self.tools is None:
            return
        report = await self.tools.health()
        if report.status != "healthy":
            raise ToolFault(FaultKind.UNREACHABLE, f"it is {report.status}: {report.message}", retryable=True)

    async def run(self, job: GenerationJob, observer: StreamObserver | None = None) -> Trajectory:
        """The trajectory of one answer. Raises HttpError if infrastructure failed it, and what the engine raises."""
        uses_tools = self.uses_tools and (job.tool_names != () or job.open_prompt is not None)
        adapter = EpisodeAdapter(
            self.engine,
            self.tools if uses_tools else None,
            self.tokenizer,
            observer=observer,
            token_limit=job.token_limit,
            tool_names=job.tool_names,
        )
        formats = self.formats if job.formats is None else job.formats
        renderer = job.renderer or self._renderer
        episode = Episode(
            *(adapter, adapter, self.tokenizer, self.options),
            renderer=renderer,
            formats=formats,
            image_tokens=self.image_tokens,
        )
        try:
            async with self.admission.place(MODEL_PLACE):
                trajectory = await episode.run(
                    job.prompt_ids,
                    images=job.images,
                    sampling_params=job.sampling_params,
                    trajectory_id=job.trajectory_id,
                    use_tool=uses_tools,
                    extra=job.extra,
                    max_turns=job.max_turns,
                    min_turns=job.min_turns,
                    verification=job.verification,
                    task_prompt=job.task_prompt,
                    open_prompt=job.open_prompt,
                )
        except asyncio.CancelledError:
            self._close_later(self._close(episode, adapter, job.trajectory_id))
            raise
        if trajectory.fault is not None:
            raise from_fault(trajectory.fault)
        if trajectory.stop is StopReason.ABORTED:
            raise overloaded("the engine gave this request up; send it again", code="engine_aborted")
        return replace(trajectory, extra=dict(job.record)) if job.record else trajectory

    async def aclose(self) -> None:
        """Let cancelled trajectories free their state on the tool server."""
        if self._closing:
            await asyncio.wait(set(self._closing))
        await self.image_reader.close()

    async def _close(self, episode: Episode, adapter: EpisodeAdapter, trajectory_id: str) -> None:
        """Stop the tool of a cancelled trajectory, and let the tool server free its state."""
        try:
            await asyncio.wait_for(adapter.stop_tool(trajectory_id), RELEASE_SECONDS)
        except (asyncio.TimeoutError, ToolFault) as error:
            log.debug("the tool of trajectory %s may run on: %s", trajectory_id, error)
        await episode.aclose()

    def _close_later(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _fetch_tools(self) -> tuple[ToolDescription, ...]:
        """As `_tools_known`; those that were known last if the server does not tell them soon."""
        async with self._asking:
            if time.monotonic() > self._silent_until:
                try:
                    await asyncio.wait_for(self._tools_known(), QUICK_SECONDS)
                except (HttpError, asyncio.TimeoutError) as error:
                    self._silent_until = time.monotonic() + TOOLS_KNOWN_SECONDS
                    why = str(error) or f"no answer within {QUICK_SECONDS:g} s"
                    log.warning("the tool server does not tell its tools, and tags of their names are none: %s", why)
            return self._known_tools

    async def _tools_known(self) -> tuple[ToolDescription, ...]:
        if self.tools is None:
            return ()
        if time.monotonic() > self._known_until:
            try:
                self._known_tools = tuple(await self.tools.tools())
            except ToolFault as fault:
                raise from_fault(fault.as_fault()) from None
            self._known_until = time.monotonic() + TOOLS_KNOWN_SECONDS
        return self._known_tools
