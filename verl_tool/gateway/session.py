"""One agent's session: from a request to the model's answer, once for each sample, whatever happens to connections."""

from __future__ import annotations

import asyncio
import functools
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.agent_loop.generators.base import Generation, Generator
from verl_tool.agent_loop.generators.turn_writer import up_to_stop
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.errors import ConfigError
from verl_tool.formats import Format
from verl_tool.formats.find import find_calls
from verl_tool.formats.scan import THOUGHTS
from verl_tool.gateway.conversation import AgentRequest, Finish, ModelAnswer, ToolCall
from verl_tool.gateway.conversation_renderer import ConversationRenderer
from verl_tool.gateway.dialects.base import RequestError
from verl_tool.gateway.session_tree import ModelTurn, SessionPolicy, SessionTree

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

    generator: Generator
    tokenizer: Tokenizer
    formats: tuple[Format, ...]
    """Those in which it calls tools."""
    end_token_ids: frozenset[int]
    max_model_len: int

    @classmethod
    def create(
        cls,
        generator: Generator,
        tokenizer: Tokenizer,
        formats: Sequence[Format],
        max_model_len: int,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> SessionModel:
        """end_token_ids: those that end a turn in addition to the tokenizer's own."""
        ends = end_token_ids | tokenizer.eos_token_ids
        return cls(generator, tokenizer, tuple(formats), ends, max_model_len)

    @functools.cached_property
    def renderer(self) -> ConversationRenderer:
        """Renders its prompts. Raises ConfigError if it has no chat template."""
        try:
            return ConversationRenderer(self.tokenizer, self.end_token_ids, self.formats)
        except Exception as error:  # a template is a program, and raises what it likes
            raise ConfigError(f"agents need a model with a chat template: {error}") from error


@dataclass(eq=False)
class PendingAnswer:
    """An answer that is made, or was made and has not reached the agent."""

    task: asyncio.Task[ModelTurn]
    readers: int = 0
    """Connections that wait for it."""


@dataclass(eq=False)
class AgentSession:
    """All that belongs to one run of an agent. Requests may come at the same time."""

    id: str
    model: SessionModel
    options: SessionOptions
    key: str = field(default_factory=lambda: f"vt-{secrets.token_urlsafe(24)}")
    """The agent's API key, which tells the session too."""
    used_at: float = field(default_factory=time.monotonic)
    record: Trajectory | None = None
    """Once it is finished."""
    engine_failure: str | None = None
    """What the engine raised last."""
    aborted: bool = False
    """The engine gave up an answer."""

    def __post_init__(self) -> None:
        self.tree = SessionTree(self.model.renderer, self.options.policy)
        self._pending: dict[str, PendingAnswer] = {}
        self._lock = asyncio.Lock()

    def has_key(self, key: str) -> bool:
        """Whether `key` is the session's."""
        return hmac.compare_digest(self.key.encode(), key.encode())

    async def open_answer(self, request: AgentRequest) -> tuple[str, PendingAnswer]:
        """Begin an answer, or find the one that an earlier attempt of the same request did not receive.

        The caller is one of its readers, until `close_answer`. Raises RequestError for a finished session, one that has
        had its turns, or a request that the model cannot be fed.
        """
        self.used_at = time.monotonic()
        if self.record is not None:
            raise RequestError("this session is finished; open another with POST /sessions")
        async with self._lock:  # a long conversation takes a while, and is rendered in a thread
            placement = await asyncio.to_thread(self.tree.place, request)
        if self.record is not None:
            raise RequestError("this session is finished; open another with POST /sessions")
        # Whether the answer is streamed is not part of it: a client may ask for the whole after a broken stream.
        fingerprint = f"{placement.request_key.hex()} {request.max_tokens} {request.stop}"
        pending = await self._unread(fingerprint)
        if pending is not None:
            pending.readers += 1
            return fingerprint, pending
        if len(self.tree.turns) + len(self._pending) >= self.options.max_turns:
            raise RequestError(f"this session has had max_turns={self.options.max_turns} answers")
        room = self.model.max_model_len - len(placement.prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"prompt is too long: {len(placement.prompt_ids)} tokens > {self.model.max_model_len - 1} maximum "
                "(context_length_exceeded)"
            )
        limits = [room, self.options.max_tokens, request.max_tokens]
        params = dict(self.options.sampling) | {"max_tokens": min(n for n in limits if n is not None)}
        if request.stop:
            params |= {"stop": list(request.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
        params["stop_token_ids"] = sorted(self.model.end_token_ids)

        async def generate() -> ModelTurn:
            try:
                generation = await asyncio.wait_for(
                    self.model.generator.generate(list(placement.prompt_ids), params, self.id),
                    self.options.answer_seconds,
                )
            except Exception as error:
                self.engine_failure = f"{type(error).__name__}: {error}"
                raise
            self.aborted |= generation.stop_reason == "aborted"
            generation = up_to_stop(generation, params, self.model.tokenizer)
            self.used_at = time.monotonic()
            answer = self._answer(request, generation, len(placement.prompt_ids))
            async with self._lock:
                return self.tree.add(placement, generation, answer)

        pending = PendingAnswer(asyncio.ensure_future(generate()), readers=1)
        self._pending[fingerprint] = pending
        return fingerprint, pending

    async def _unread(self, fingerprint: str) -> PendingAnswer | None:
        """The answer to an earlier attempt of a request, if nobody waits for it any more. A client may repeat a request
        before it is known here that it closed the first connection."""
        until = time.monotonic() + _CLOSING_SECONDS
        while (pending := self._pending.get(fingerprint)) is not None and not _has_failed(pending.task):
            if not pending.readers:
                return pending
            if time.monotonic() > until:
                break
            await asyncio.sleep(0.01)
        return None

    def close_answer(self, fingerprint: str, pending: PendingAnswer, *, delivered: bool) -> None:
        """A connection that waited for an answer is closed; `delivered`: the agent has received all of it."""
        pending.readers -= 1
        if delivered:
            pending.task.result().delivered = True
        if (delivered or _has_failed(pending.task)) and self._pending.get(fingerprint) is pending:
            del self._pending[fingerprint]

    async def finish(self, reward: float | None = None, extra: Mapping[str, Any] | None = None) -> Trajectory:
        """End the session, cancel what is being generated, and give its rollout."""
        if self.record is None:
            pending, self._pending = self._pending, {}
            for each in pending.values():
                each.task.cancel()
            await asyncio.gather(*(each.task for each in pending.values()), return_exceptions=True)
            rollout = self.tree.rollout(self.id).with_reward(reward)
            self.record = rollout if not extra else _with_extra(rollout, extra)
        return self.record

    def _answer(self, request: AgentRequest, generation: Generation, prompt_tokens: int) -> ModelAnswer:
        tokens = list(generation.token_ids)
        n = len(tokens)
        while n and tokens[n - 1] in self.model.end_token_ids:
            n -= 1
        text = self.model.tokenizer.decode(tokens[:n])
        stopped = min((stop for stop in request.stop if stop in text), key=text.index, default=None)
        text = text if stopped is None else text.partition(stopped)[0]
        thoughts, text = _split_thoughts(text)
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


def _split_thoughts(text: str) -> tuple[str, str]:
    """Thoughts, and the text behind them. The template may have opened the thoughts in the prompt."""
    for opening, closing in THOUGHTS.items():
        before, found, behind = text.partition(closing)
        if found:
            return before.removeprefix(opening).strip(), behind
    return "", text


def _has_failed(task: asyncio.Task[ModelTurn]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _with_extra(rollout: Trajectory, extra: Mapping[str, Any]) -> Trajectory:
    return replace(rollout, extra={**rollout.extra, **extra})
