"""Searches the web: ``<search>who won the final</search>``, or ``{"queries": […]}`` with several queries in one call.

One of the providers of `verl_tool.web.providers` is asked, with its key from the environment. Answers are kept
(`verl_tool.web.answer_store`), and with the option ``replay`` they are all there is. A provider that fails is a fault.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal

from pydantic import Field

from verl_tool.client.exchange import TooLongError
from verl_tool.client.pacing import RateLimiter, retry_until
from verl_tool.errors import StartError, ToolFault
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind
from verl_tool.servers.tools._queries import QueryTool, joined_answers, queries_of
from verl_tool.servers.tools._service import (
    MAX_ANSWER_BYTES,
    RemoteService,
    ServiceRejectedError,
    base_url,
)
from verl_tool.servers.tools._web import WebOptions
from verl_tool.servers.tools.base import Context, InvalidCall, ToolResult
from verl_tool.web.answer_store import NotRecorded
from verl_tool.web.providers import PROVIDERS, FailedEngines, OddAnswer, Provider, WebHit, Wish

NOTHING_FOUND = "No page was found for this query."
_NOT_RECORDED = "There is no recorded answer to this query."
_NO_CREDIT = "not enough credits"
"""What Serper answers with HTTP 400 when the account is used up."""
_NAMES = ("web_search", "google_search", "bing_search", "search")


class WebSearchOptions(WebOptions):
    """Which provider, and how much to show."""

    provider: Literal["serper", "brave", "tavily", "brightdata", "searxng"] | None = None
    """None: serper, or brightdata for the tool bing_search."""
    url: str | None = None
    """Address in place of the provider's own; of SearXNG it must be given."""
    max_results: int = Field(default=10, ge=1, le=100)
    """Pages for each query."""
    result_length: int = Field(default=1000, ge=20)
    """Characters that are shown of each page's words."""
    location: str = Field(default="us", pattern="^[A-Za-z]{2}$")
    language: str = Field(default="en", min_length=2)
    zone: str = "serp_api1"
    """Bright Data's zone."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """Of one request."""
    total_seconds: float = Field(default=90.0, gt=0)
    """For a query, all requests and pauses included."""
    requests_per_second: float | None = Field(default=None, gt=0)
    """Of each replica; None: as they come."""


class WebSearchTool(QueryTool):
    """One provider for all trajectories."""

    name = "web_search"
    description = "Searches the web and returns title, address and some words of the pages that fit a query best."
    default_provider: ClassVar[str] = "serper"
    example_actions = (
        "<search>capital of France</search>",
        '<tool_call>\n{"name": "web_search", "arguments": {"queries": ["capital of France"]}}\n</tool_call>',
        "```search\ncapital of France\n```",
    )
    Options = WebSearchOptions
    options: WebSearchOptions
    _service: RemoteService | None = None

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._provider_name = self.options.provider or self.default_provider
        self._store = self.options.new_store()
        per_second = self.options.requests_per_second
        self._interval = 1 / per_second if per_second else 0.0
        self._limiter = RateLimiter(self._interval)

    @property
    def call_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().call_names, *_NAMES)))

    @property
    def provider(self) -> Provider:
        return PROVIDERS[self._provider_name]

    async def start(self) -> None:
        """Raises StartError if there is no key or address, ConfigError if the address is none. Nothing is asked yet:
        a query costs."""
        if not self.options.replay:
            self._service = self._new_service()
        self._store.start()

    def _new_service(self) -> RemoteService:
        variables = self.provider.key_variables
        key = next((value for name in variables if (value := os.environ.get(name, "").strip())), None)
        if variables and key is None:
            raise StartError(
                f"tool {self.name}: the provider {self._provider_name} needs a key; set the environment variable "
                f"{' or '.join(variables)} where the server is started, or choose another provider in --tool_config: "
                f"{', '.join(PROVIDERS)}"
            )
        url = self.options.url or self.provider.url
        if not url:
            raise StartError(f"tool {self.name}: give the address of {self._provider_name} as the option url")
        return RemoteService(
            self._provider_name,
            base_url(self.name, url),
            key,
            self.options.max_concurrent,
            self.options.total_seconds,
            key_header=self.provider.key_header,
            settings=" and ".join(["the option url", *(f"the variable {name}" for name in variables[:1])]),
        )

    async def close(self) -> None:
        await self._store.close()
        if self._service is not None:
            await self._service.close()

    async def run(self, call: Call, context: Context) -> ToolResult:
        queries = self._queries(call)
        found = await asyncio.gather(*map(self._search, queries))
        missed = sum(hits is None for hits in found)
        metrics = {
            "queries": float(len(queries)),
            "pages": float(sum(len(hits or ()) for hits in found)),
            "not_recorded": float(missed),
        }
        texts = [_NOT_RECORDED if hits is None else self._as_text(hits) for hits in found]
        return ToolResult(joined_answers(queries, texts), error=missed > 0, metrics=metrics)

    def _queries(self, call: Call) -> list[str]:
        queries = queries_of(call, self.provider.query_characters)
        for query in queries:
            if len(query.split()) > self.provider.query_words:
                raise InvalidCall(f"a query has more than {self.provider.query_words} words; search for fewer")
        return queries

    async def _search(self, query: str) -> list[WebHit] | None:
        """None if only recorded answers are given and this is none. Raises ToolFault if the provider fails: a model
        must never read that there is nothing."""
        chosen = self.options
        count = min(chosen.max_results, self.provider.max_hits)
        wish = Wish(query, count, chosen.location.lower(), chosen.language, chosen.zone)
        key = {"search": self._provider_name, **asdict(wish)}
        try:
            found = await self._store.answer(key, lambda: self._ask(wish))
        except NotRecorded:
            return None
        return [WebHit(**hit) for hit in found]

    async def _ask(self, wish: Wish) -> list[dict[str, Any]]:
        hits = await retry_until(lambda seconds: self._ask_once(wish, seconds), self.options.total_seconds)
        return [asdict(hit) for hit in hits[: wish.count]]

    async def _ask_once(self, wish: Wish, seconds: float) -> list[WebHit]:
        """Raises ToolFault."""
        if self._service is None:
            raise ToolFault(FaultKind.UNREACHABLE, f"{self.name} has not been started", retryable=True)
        try:
            await self._limiter.wait(seconds)
        except asyncio.TimeoutError:
            words = f"no turn within {seconds:.3g} s at one request each {self._interval:.3g} s (requests_per_second)"
            raise ToolFault(FaultKind.OVERLOADED, words, retryable=True) from None
        ask = self.provider.ask(wish)
        try:
            answer = await self._service.ask(ask.method, ask.path, ask.body, min(seconds, self.options.timeout_seconds))
        except ServiceRejectedError as error:
            # A query may be what it refuses, and queries are the model's.
            kind = FaultKind.MISCONFIGURED if _NO_CREDIT in str(error).lower() else FaultKind.BAD_REQUEST
            raise ToolFault(kind, f"{self._provider_name} refuses a query: {error}", retryable=False) from error
        except TooLongError as error:
            words = f"an answer of {self._provider_name} is longer than {MAX_ANSWER_BYTES >> 20} MB"
            raise ToolFault(FaultKind.UNREACHABLE, words, retryable=False) from error
        try:
            return self.provider.read(answer)
        except OddAnswer as error:
            raise self._service.malformed(error) from error
        except FailedEngines as error:
            raise ToolFault(FaultKind.UNREACHABLE, f"{self._provider_name} {error}", retryable=True) from error

    def _as_text(self, hits: Sequence[WebHit]) -> str:
        entries = [f"[{number}] {hit.title}\n{hit.url}\n{self._cut(hit.text)}" for number, hit in enumerate(hits, 1)]
        return "\n\n".join(map(str.rstrip, entries)) or NOTHING_FOUND

    def _cut(self, text: str) -> str:
        maximum = self.options.result_length
        return text if len(text) <= maximum else f"{text[:maximum].rstrip()}…"
