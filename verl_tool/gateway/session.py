"""One agent's session: from a request to the model's answer, once for each sample, whatever happens to connections."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.agent_loop.generators.base import Generation, Generator, ImageGenerator
from verl_tool.agent_loop.generators.turn_writer import up_to_stop
from verl_tool.agent_loop.rendering.images import ImagePlacer
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import Excluded, StopReason, Trajectory
from verl_tool.errors import ConfigError
from verl_tool.formats import Format
from verl_tool.formats.find import find_calls
from verl_tool.formats.native.harmony import MESSAGE, HarmonyFormat
from verl_tool.formats.scan import split_thoughts
from verl_tool.gateway.conversation import AgentRequest, Finish, ModelAnswer, ToolCall
from verl_tool.gateway.conversation_renderer import ConversationRenderer
from verl_tool.gateway.dialects.base import RequestError
from verl_tool.gateway.mcp_tools import SessionTools
from verl_tool.gateway.request_reader import RequestReader
from verl_tool.gateway.session_record import SESSION
from verl_tool.gateway.session_tree import ModelTurn, Placement, SessionPolicy, SessionTree
from verl_tool.protocol import Fault, FaultKind

_CHARACTERS_A_TOKEN = 16
"""More than texts have on average in any language."""
_rendering = ThreadPoolExecutor(2, thread_name_prefix="rendering")
_MAX_REJECTIONS, _MAX_REJECTION = 8, 300
"""Messages, and characters of each, that a record has."""
_CLOSING_SECONDS = 0.8
"""More than it takes to notice that a client has left (`verl_tool.http.disconnect`)."""


class ContextLengthError(RequestError):
    """The conversation does not fit into the model's context."""


class SessionOptions(BaseModel):
    """What a session may use, and how it samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sampling: dict[str, Any] = Field(default_factory=dict)
    """Parameters of every generation, with vLLM's names, in place of the gateway's. What an agent asks for has no
    effect."""
    policy: SessionPolicy = SessionPolicy()
    max_turns: int = Field(default=200, ge=1)
    """Most answers; further requests are rejected."""
    max_tokens: int = Field(default=8192, ge=1)
    """Most tokens of one answer; an agent may ask for fewer."""
    answer_seconds: float = Field(default=600.0, gt=0)
    """For one answer."""
    cut_answers_look_whole: bool = False
    """An answer that `max_tokens` cut is sent as one that the model ended: some agents stop at a cut one."""


@dataclass(frozen=True)
class SessionModel:
    """The model behind a gateway."""

    generator: Generator | ImageGenerator
    tokenizer: Tokenizer
    formats: tuple[Format, ...]
    """Those in which it calls tools."""
    end_token_ids: frozenset[int]
    max_model_len: int
    images: ImagePlacer | None = None
    """How it reads images; None: it reads text only."""
    max_images: int | None = None
    """Of one request; None: any number."""
    place: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Held while an answer is sampled. Its errors are those of the engine, and the wait for it is not part of
    `SessionOptions.answer_seconds`."""

    @classmethod
    def create(
        cls,
        generator: Generator | ImageGenerator,
        tokenizer: Tokenizer,
        formats: Sequence[Format],
        max_model_len: int,
        end_token_ids: frozenset[int] = frozenset(),
        place: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        images: ImagePlacer | None = None,
        max_images: int | None = None,
    ) -> SessionModel:
        """end_token_ids: those that end a turn in addition to the tokenizer's own."""
        ends = end_token_ids | tokenizer.eos_token_ids
        return cls(generator, tokenizer, tuple(formats), ends, max_model_len, images, max_images, place)

    @functools.cached_property
    def renderer(self) -> ConversationRenderer:
        """Renders its prompts. Raises ConfigError if it has no chat template."""
        try:
            return ConversationRenderer(self.tokenizer, self.end_token_ids, self.formats, self.images)
        except Exception as error:  # a template is a program, and raises what it likes
            raise ConfigError(f"agents need a model with a chat template: {error}") from error


@dataclass(eq=False)
class PendingAnswer:
    """An answer that is made, or was made and has not reached the agent."""

    fingerprint: str
    """Equal for repetitions of a request."""
    task: asyncio.Task[ModelTurn]
    readers: int = 0
    """Connections that wait for it."""
    attempts: int = 1
    """Connections that have asked for it."""

    @property
    def has_failed(self) -> bool:
        """Whether there will be no answer."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass(eq=False)
class AgentSession:
    """All that belongs to one run of an agent. Requests may come at the same time."""

    id: str
    model: SessionModel
    options: SessionOptions
    key: str = field(default_factory=lambda: f"vt-{secrets.token_urlsafe(24)}")
    """The agent's API key, which tells the session too."""
    used_at: float = field(default_factory=time.monotonic)
    num_requests: int = 0
    """For answers, that the model was asked for."""
    engine_failure: str | None = None
    """What the engine raised last, if it has not answered since."""
    aborted: bool = False
    """The engine gave up an answer."""
    tools: SessionTools | None = None
    """What the agent may call over MCP."""
    opened_at: float = field(default_factory=time.monotonic)
    rejections: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_REJECTIONS))
    """What the agent was told of its last requests that were rejected."""

    def __post_init__(self) -> None:
        self.tree = SessionTree(self.model.renderer, self.options.policy)
        self.reader = RequestReader()
        self._pending: list[PendingAnswer] = []
        self._lock = asyncio.Lock()
        self._finishing: asyncio.Task[Trajectory] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether it takes no more requests."""
        return self._finishing is not None

    @property
    def turns_left(self) -> int:
        """Answers that it may still ask for."""
        running = sum(not each.task.done() for each in self._pending)
        return max(0, self.options.max_turns - len(self.tree.turns) - running)

    async def open_answer(self, request: AgentRequest) -> PendingAnswer:
        """Begin an answer, or find the one that an earlier attempt of the same request did not receive.

        The caller is one of its readers, until `close_answer`. Raises RequestError for a finished session, one that has
        had its turns, or a request that the model cannot be fed.
        """
        self.used_at = time.monotonic()
        self._reject_finished()
        placement = await self._place(request)
        self._reject_finished()
        # Whether the answer is streamed is not part of it: a client may ask for the whole after a broken stream.
        fingerprint = f"{placement.request_key.hex()} {request.max_tokens} {request.stop}"
        pending = await self._unread(fingerprint)
        if pending is not None:
            pending.readers += 1
            pending.attempts += 1
            return pending
        if not self.turns_left:
            raise RequestError(f"this session has had max_turns={self.options.max_turns} answers")
        room = self.model.max_model_len - len(placement.prompt_ids)
        if room < 1:
            raise _too_long(f"{len(placement.prompt_ids)} tokens", self.model.max_model_len - 1)
        limit = self.model.max_images
        if limit is not None and len(placement.images) > limit:
            raise RequestError(f"messages: {len(placement.images)} images, and the model is fed at most {limit}")
        self._reject_finished()
        limits = [room, self.options.max_tokens, request.max_tokens]
        params = dict(self.options.sampling) | {"max_tokens": min(n for n in limits if n is not None)}
        if request.stop:
            params |= {"stop": list(request.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
        params["stop_token_ids"] = sorted(self.model.end_token_ids)
        self.num_requests += 1
        generating = asyncio.ensure_future(self._generate(placement, params))
        pending = PendingAnswer(fingerprint, generating, readers=1)
        self._pending.append(pending)
        return pending

    def close_answer(self, pending: PendingAnswer, *, delivered: bool) -> None:
        """A connection that waited for an answer is closed; `delivered`: the agent has received all of it."""
        pending.readers -= 1
        if delivered:
            turn = pending.task.result()
            turn.attempts = pending.attempts
            self.tree.deliver(turn)
        if (delivered or pending.has_failed) and pending in self._pending:
            self._pending.remove(pending)

    async def count_tokens(self, request: AgentRequest) -> int:
        """Tokens that the model would be fed. Raises RequestError as `open_answer`."""
        self._reject_finished()
        return len((await self._place(request)).prompt_ids)

    async def finish(self, reward: float | None = None, extra: Mapping[str, Any] | None = None) -> Trajectory:
        """End the session, cancel what is being generated, and give its rollout; the same one when called again."""
        if self._finishing is None:
            self._finishing = asyncio.ensure_future(self._finish(reward, extra or {}))
        return await asyncio.shield(self._finishing)

    async def _finish(self, reward: float | None, extra: Mapping[str, Any]) -> Trajectory:
        tasks = [each.task for each in self._pending]
        self._pending.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        rollout = self.tree.rollout(self.id).with_reward(reward)
        if self.aborted:
            rollout = replace(rollout, stop=StopReason.ABORTED, excluded=Excluded.ABORTED)
        elif self.engine_failure is not None:
            rollout = with_fault(rollout, self.engine_failure)
        if self.tools is not None:
            await self.tools.close()
            rollout = self.tools.add_to(rollout)
        options = self.options.model_dump(mode="json", exclude={"policy"})
        described = {**rollout.extra[SESSION], **options, "requests": self.num_requests}
        described["rejected"] = [message[:_MAX_REJECTION] for message in self.rejections]
        timings = replace(rollout.timings, total=time.monotonic() - self.opened_at)
        return replace(rollout, timings=timings, extra={SESSION: described, **extra})

    def _reject_finished(self) -> None:
        if self.is_finished:
            raise RequestError("this session is finished; open another with POST /sessions")

    async def _place(self, request: AgentRequest) -> Placement:
        """A long conversation takes a while, and is rendered in a thread, one of a session at a time."""
        characters = sum(len(message.text) for message in request.messages)
        if characters > self.model.max_model_len * _CHARACTERS_A_TOKEN:
            raise _too_long(f"{characters} characters", self.model.max_model_len * _CHARACTERS_A_TOKEN)

        async def place() -> Placement:
            async with self._lock:
                return await asyncio.get_running_loop().run_in_executor(_rendering, self.tree.place, request)

        # A client that leaves must not free the lock while the thread is at work.
        return await asyncio.shield(asyncio.ensure_future(place()))

    async def _generate(self, placement: Placement, params: dict[str, Any]) -> ModelTurn:
        started = time.monotonic()
        try:
            images: dict[str, Any] = {"images": list(placement.images)} if placement.images else {}
            async with self.model.place():
                sampling = self.model.generator.generate(placement.prompt_ids, params, self.id, **images)
                generation = await asyncio.wait_for(sampling, self.options.answer_seconds)
            if self.model.images is not None:
                self._reject_image_tokens(generation, self.model.images.tokens.banned_ids)
        except asyncio.TimeoutError:  # a long answer is the model's
            raise
        except Exception as error:
            self.engine_failure = f"{type(error).__name__}: {error}"
            raise
        self.engine_failure = None
        self.aborted |= generation.stop_reason == "aborted"
        generation = up_to_stop(generation, params, self.model.tokenizer)
        self.used_at = time.monotonic()
        answer = self._answer(placement.request, generation, len(placement.prompt_ids))
        async with self._lock:
            turn = self.tree.add(placement, generation, answer)
        turn.seconds = time.monotonic() - started
        return turn

    @staticmethod
    def _reject_image_tokens(generation: Generation, banned: Sequence[int]) -> None:
        """Raises ConfigError if the model wrote a part of an image, which nothing stands behind."""
        if not set(banned).isdisjoint(generation.token_ids):
            raise ConfigError("the model wrote a token for a part of an image; configure the engine to never sample it")

    async def _unread(self, fingerprint: str) -> PendingAnswer | None:
        """The answer to an earlier attempt of a request, if nobody waits for it any more. A client may repeat a request
        before it is known here that it closed the first connection."""
        until = time.monotonic() + _CLOSING_SECONDS
        while True:
            same = [each for each in self._pending if each.fingerprint == fingerprint and not each.has_failed]
            unread = next((each for each in same if not each.readers), None)
            if unread is not None or not same or time.monotonic() > until:
                return unread
            await asyncio.sleep(0.01)

    def _answer(self, request: AgentRequest, generation: Generation, prompt_tokens: int) -> ModelAnswer:
        tokens = list(generation.token_ids)
        n = len(tokens)
        while n and tokens[n - 1] in self.model.end_token_ids:
            n -= 1
        text = self.model.tokenizer.decode(tokens[:n])
        stopped = min((stop for stop in request.stop if stop in text), key=text.index, default=None)
        text = text if stopped is None else text.partition(stopped)[0]
        thoughts, text = split_thoughts(text)
        calls: list[ToolCall] = []
        if request.tools or request.deferred_tools:
            found = find_calls(text, self.model.formats)
            for call in found:
                is_text = call.name in request.text_tools
                arguments = call.input if is_text or call.error else call.arguments_json()
                made = f"call_{secrets.token_hex(12)}"
                calls.append(ToolCall(call.name, arguments, made, is_text, call.id or "", call.error))
            for call in reversed(found):
                text = text[: call.start] + text[call.end :]
        if any(isinstance(each, HarmonyFormat) for each in self.model.formats) and MESSAGE in text:
            thoughts, text = HarmonyFormat.split_channels(text)
        finish = Finish.CALLS if calls else Finish.STOP
        if generation.stop_reason == "length" and not self.options.cut_answers_look_whole:
            finish = Finish.LENGTH
        return ModelAnswer(
            id=secrets.token_hex(12),
            model=request.model,
            text=text.strip() if calls or thoughts else text,
            thoughts=thoughts,
            calls=tuple(calls),
            finish=finish,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(tokens),
            created=int(time.time()),
            stop_string=stopped,
        )


def with_fault(rollout: Trajectory, message: str) -> Trajectory:
    """`rollout`, left out of the loss because infrastructure failed."""
    fault = Fault(kind=FaultKind.MISCONFIGURED, message=message, retryable=False)
    return replace(rollout, stop=StopReason.FAULT, fault=fault, excluded=Excluded.FAULT)


def _too_long(length: str, limit: int) -> ContextLengthError:
    return ContextLengthError(f"prompt is too long: {length} > {limit} maximum (context_length_exceeded)")
