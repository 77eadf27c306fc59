"""One trajectory's way to the engine and to the tools, and who is told of what passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval_service.engines.base import Engine, TokenChunk
from verl_tool.agent_loop.actions import length_to_stop
from verl_tool.agent_loop.generators.base import Generation, generating_summary
from verl_tool.agent_loop.generators.turn_writer import up_to_stop
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.tool_channel import Tools, queue_timeout_of
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ConfigError
from verl_tool.protocol import ABORT_FIELD, ENVIRONMENT_FIELD, TOOLS_FIELD, VERDICT_FIELD, VERIFY_FIELD, StepResult


class StreamObserver:
    """Is told of a trajectory while it runs. What it awaits holds the trajectory up: a slow reader slows the writer."""

    async def wrote(self, chunk: TokenChunk) -> None:
        """The model wrote these tokens."""

    async def summary_begins(self) -> None:
        """What the model writes next is a summary of its context."""

    async def turn_over(self) -> None:
        """The model's turn, or its summary, has ended; all of its tokens were told."""

    async def called(self, action: str) -> None:
        """The turn is an action; a tool is about to run it."""

    async def answered(self, result: StepResult) -> None:
        """The tools answered the action."""

    async def appended(self, token_ids: Sequence[int]) -> None:
        """The next turn begins; these tokens, which the model did not write, stand between the two."""


class EpisodeAdapter:
    """The `Generator` and the `Tools` of one trajectory.

    `token_limit`: most tokens that the model writes over all its turns. `tool_names`: the only tools that may be used;
    None: all.
    """

    def __init__(
        self,
        engine: Engine,
        tools: Tools | None,
        tokenizer: Tokenizer,
        *,
        observer: StreamObserver | None = None,
        token_limit: int | None = None,
        tool_names: Sequence[str] | None = None,
    ) -> None:
        self._engine, self._tools, self._tokenizer, self._observer = engine, tools, tokenizer, observer
        self.queue_timeout = queue_timeout_of(tools)
        self._left = token_limit
        self._restriction = {} if tool_names is None else {TOOLS_FIELD: list(tool_names)}
        self._seen: int | None = None
        self._waiting = False
        """A tool was called and has not answered."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        """The model's next turn, within what is left of the tokens; without any left it is empty."""
        observer = self._observer
        if observer is not None and self._seen is not None:
            await observer.appended(prompt_ids[self._seen :])
        maximum = self._max_of(len(prompt_ids), sampling_params.get("max_tokens"))
        if maximum <= 0:
            return Generation((), stop_reason="length")
        if observer is not None and generating_summary.get():
            await observer.summary_begins()
        params = sampling_params | {"max_tokens": maximum}
        filtered = None if observer is None else _StopStringFilter(observer, params.get("stop") or (), self._tokenizer)
        listen = None if filtered is None else filtered.wrote
        media: dict[str, Any] = {"images": images} if images else {}
        generation = up_to_stop(
            await self._engine.generate(prompt_ids, params, request_id, listen, **media), params, self._tokenizer
        )
        n = len(generation.token_ids)
        self._seen = len(prompt_ids) + n
        if self._left is not None:
            self._left -= n
        if observer is not None:
            await observer.turn_over()
        return generation

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
        if self._tools is None:
            raise ConfigError("no tool server is set; start the service with --tool_server_url or --tool_type")
        if finish:
            return await self._tools.call(trajectory_id, "", finish=True)
        # A verifier is none of the client's calls, nor is the beginning in an environment.
        silent = {VERIFY_FIELD, VERDICT_FIELD, ENVIRONMENT_FIELD}
        observer = self._observer if silent.isdisjoint(extra or {}) else None
        if observer is not None:
            await observer.called(action)
        self._waiting = True
        result = await self._tools.call(
            trajectory_id,
            action,
            step=step,
            extra={**(extra or {}), **self._restriction},
            is_last_step=is_last_step,
        )
        self._waiting = False
        if observer is not None and result.fault is None:
            await observer.answered(result)
        return result

    async def stop_tool(self, trajectory_id: str) -> None:
        """Stop the tool that was called and has not answered, if there is one. Raises ToolFault."""
        if self._tools is not None and self._waiting:
            await self._tools.call(trajectory_id, "", finish=True, extra={ABORT_FIELD: True})

    def _max_of(self, prompt_length: int, asked: int | None) -> int:
        limits = (asked, self._left, self._engine.max_model_len - prompt_length)
        return min(limit for limit in limits if limit is not None)


class _StopStringFilter(StreamObserver):
    """Tells an observer of one turn's tokens up to the one that completes a stop string.

    An engine that draws several tokens at a time may send more with it; they are no part of the turn.
    """

    def __init__(self, observer: StreamObserver, stops: Sequence[str], tokenizer: Tokenizer) -> None:
        self._observer, self._stops, self._tokenizer = observer, stops, tokenizer
        self._reach = max((len(stop.encode()) for stop in stops), default=0) + 4
        """Tokens among which a stop string stands that ends in the last of them: each holds a byte of it at least."""
        self._tail: list[int] = []
        self._stopped = False

    async def wrote(self, chunk: TokenChunk) -> None:
        if self._stopped:
            return
        before = len(self._tail)
        self._tail += chunk.token_ids
        n = length_to_stop(self._tail, self._stops, self._tokenizer) if len(chunk.token_ids) > 1 else None
        if n is not None and before < n < len(self._tail):
            self._stopped = True
            left = n - before
            chunk = TokenChunk(chunk.token_ids[:left], None if chunk.log_probs is None else chunk.log_probs[:left])
        self._tail = self._tail[-self._reach :]
        await self._observer.wrote(chunk)
