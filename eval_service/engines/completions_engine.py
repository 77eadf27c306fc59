"""A server that speaks OpenAI's ``/v1/completions`` with token ids both ways, such as ``vllm serve``.

The prompt goes as a list of token ids; ``return_token_ids`` asks for those of the answer. A server that sends none
cannot be used: text would have to be encoded again, and would no longer be what the model wrote.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from eval_service.engines.base import EngineError, Listener, RequestRejectedError, TokenChunk, TokenLogProb
from eval_service.settings import CompletionsSettings
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.client.exchange import KEEP_ALIVE_SECONDS
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ConfigError
from verl_tool.util.json_text import BadJsonError, decode_json, encode_json

START_SECONDS = 30.0
CHECK_SECONDS = 5.0
CONNECT_SECONDS = 10.0
_MAX_LINE_BYTES = 4 << 20
_WORDS = 500
"""Characters of a server's refusal that are quoted."""


class CompletionsEngine:
    """An `Engine` over HTTP. Make it with `connect`, inside a running event loop."""

    def __init__(self, settings: CompletionsSettings, vocab_size: int) -> None:
        self._base = settings.url.rstrip("/").removesuffix("/v1")
        self._session = _session(settings, settings.max_connections)
        # Of its own: one that waits for a connection until a turn ends would be taken for dead.
        self._checks = _session(settings, 0)
        self._model = settings.model or ""
        self.max_model_len = settings.max_model_len or 0
        self.vocab_size = vocab_size

    @classmethod
    async def connect(cls, settings: CompletionsSettings, vocab_size: int) -> CompletionsEngine:
        """`vocab_size`: the tokenizer's, since such a server does not tell it. Raises EngineError if the server does
        not answer, and ConfigError if it does not tell what is needed."""
        if not settings.url.startswith(("http://", "https://")):
            raise ConfigError(f"engine_url is {settings.url!r}; begin it with http:// or https://")
        engine = cls(settings, vocab_size)
        try:
            await engine._learn(settings)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        listen: Listener | None = None,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        """See `Engine.generate`. Raises RefusedError for images: this way of asking takes token ids only."""
        if images:
            raise RequestRejectedError(
                f"{self._base}/v1/completions takes no images; serve the model here, with --model"
            )
        body = {
            **{name: value for name, value in sampling_params.items() if value is not None},
            "model": self._model,
            "prompt": prompt_ids,
            "n": 1,
            "stream": listen is not None,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        turn = _Turn(with_log_probs=sampling_params.get("logprobs") is not None)
        try:
            async with self._session.post(
                f"{self._base}/v1/completions",
                data=encode_json(body),
                headers={"content-type": "application/json", "x-request-id": request_id},
            ) as response:
                await self._reject_error(response)
                if listen is None:
                    turn.add(decode_json(await response.read()))
                else:
                    async for value in _events(response):
                        chunk = turn.add(value)
                        if chunk is not None:
                            await listen(chunk)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise EngineError(f"{self._base} failed: {error or type(error).__name__}") from error
        except BadJsonError as error:
            raise EngineError(f"{self._base} answered what is no JSON: {error}") from error
        return turn.generation()

    async def check(self) -> None:
        await self._get_models(CHECK_SECONDS)

    async def close(self) -> None:
        await self._session.close()
        await self._checks.close()

    async def _learn(self, settings: CompletionsSettings) -> None:
        """The model's name and its longest context, from ``/v1/models`` where they are not given."""
        cards = {str(card.get("id")): card for card in await self._get_models(START_SECONDS)}
        if settings.model is None and len(cards) != 1:
            raise ConfigError(f"{self._base} serves {sorted(cards)}; say which with --engine_model")
        self._model = settings.model or next(iter(cards))
        if self._model not in cards:
            raise ConfigError(f"{self._base} does not serve {self._model!r}; it serves {sorted(cards)}")
        max_model_len = settings.max_model_len or cards[self._model].get("max_model_len")
        if not isinstance(max_model_len, int):
            raise ConfigError(f"{self._base} does not tell max_model_len; give --max_model_len")
        self.max_model_len = max_model_len

    async def _get_models(self, seconds: float) -> list[Mapping[str, Any]]:
        try:
            async with self._checks.get(
                f"{self._base}/v1/models", timeout=aiohttp.ClientTimeout(total=seconds)
            ) as response:
                await self._reject_error(response)
                value = decode_json(await response.read())
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise EngineError(f"{self._base}/v1/models gives no answer: {error or type(error).__name__}") from error
        except (BadJsonError, RequestRejectedError) as error:
            raise EngineError(f"{self._base}/v1/models gives no list of models: {error}") from error
        data = value.get("data") if isinstance(value, dict) else None
        return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []

    async def _reject_error(self, response: aiohttp.ClientResponse) -> None:
        if response.status < 400:
            return
        words = (await response.text(errors="replace"))[:_WORDS]
        message = f"{self._base} answered HTTP {response.status}: {words}"
        if response.status in (400, 413, 422):
            raise RequestRejectedError(message)
        raise EngineError(message)


def _session(settings: CompletionsSettings, connections: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=KEEP_ALIVE_SECONDS),
        # A turn may take long; the loop's generation_timeout bounds it.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        headers={} if settings.api_key is None else {"authorization": f"Bearer {settings.api_key}"},
        read_bufsize=_MAX_LINE_BYTES,
    )


class _Turn:
    """One turn, put together from an answer or from the events of a stream."""

    def __init__(self, with_log_probs: bool) -> None:
        self._with_log_probs = with_log_probs
        self._token_ids: list[int] = []
        self._log_probs: list[float] = []
        self._finish: str | None = None

    def add(self, value: object) -> TokenChunk | None:
        """Take in an answer or an event. None if it brings no tokens. Raises EngineError if it cannot be used."""
        choice = _choice_in(value)
        if choice is None:
            return None
        token_ids = choice.get("token_ids")
        if token_ids is None and choice.get("text"):
            raise EngineError("the server sends no token_ids; use one that knows return_token_ids, as vLLM's does")
        entries = _log_probs(choice, token_ids or []) if self._with_log_probs else None
        self._finish = choice.get("finish_reason") or self._finish
        if not token_ids:
            return None
        self._token_ids += token_ids
        self._log_probs += [entry.log_prob for entry in entries or ()]
        return TokenChunk(token_ids, entries)

    def generation(self) -> Generation:
        """The turn. Raises EngineError if the server broke off."""
        if self._finish is None:
            raise EngineError("the server broke off before the turn's end")
        finish = "aborted" if self._finish in ("abort", "error") else self._finish
        return Generation(self._token_ids, self._log_probs if self._with_log_probs else None, finish)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[object]:
    """The JSON values of server-sent events up to the mark of the end; comments and other fields are left out."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        yield decode_json(data)


def _choice_in(value: object) -> Mapping[str, Any] | None:
    if not isinstance(value, dict):
        raise EngineError(f"the server sent {str(value)[:_WORDS]!r} where an answer was expected")
    if value.get("error"):
        raise EngineError(f"the server broke off: {str(value['error'])[:_WORDS]}")
    choices = value.get("choices")
    if not choices:
        return None
    choice: Mapping[str, Any] = choices[0]
    return choice


def _log_probs(choice: Mapping[str, Any], token_ids: list[int]) -> list[TokenLogProb]:
    log_probs = choice.get("logprobs") or {}
    values = log_probs.get("token_logprobs") or []
    tops = log_probs.get("top_logprobs") or [None] * len(values)
    if len(values) != len(token_ids):
        raise EngineError(f"the server sent {len(token_ids)} tokens and {len(values)} log-probabilities")
    return [
        TokenLogProb(token, float(value), _top(top or {}))
        for token, value, top in zip(token_ids, values, tops, strict=True)
    ]


def _top(entries: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """``{"token_id:17": -0.5}``, as vLLM spells tokens by ``return_tokens_as_token_ids``, likeliest first."""
    found = [(int(name.removeprefix("token_id:")), value) for name, value in entries.items()]
    return tuple(sorted(found, key=lambda pair: -pair[1]))
