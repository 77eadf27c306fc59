"""Reads a page of the web: ``<web_page>https://example.org</web_page>``, or ``{"url": …, "page": 2, "links": true}``.

The model sees the page's readable text (`trafilatura`), part by part, or its links. Only public addresses are connected
to (`verl_tool.web.addresses`). Whatever is wrong with a page is an observation: the model has chosen it.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.errors import SandboxError, ToolFault
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind
from verl_tool.sandbox import Level, SandboxPool
from verl_tool.servers.tools._web import WebOptions
from verl_tool.servers.tools.base import Context, InvalidCall, Tool, ToolResult
from verl_tool.web.answer_store import NotRecorded
from verl_tool.web.page_client import PageClient, PageUnavailableError, checked_url
from verl_tool.web.page_reader import Readable, new_pool, readable

LINKS_OF_PART = 50
QUEUE_SECONDS = 120.0
"""A page that finds no place among `max_concurrent` within it is the fault ``overloaded``."""
_SOLID = re.compile(r"\S")
_NOT_RECORDED = "this page is not among the recorded ones"


class WebPageOptions(WebOptions):
    """Limits of one page, and which may be read."""

    timeout_seconds: float = Field(default=30.0, gt=0)
    """For the page to arrive, redirects included."""
    part_length: int = Field(default=8000, ge=200)
    """Characters of an observation: a longer text is read part by part."""
    max_kilobytes: int = Field(default=4096, ge=1)
    """Size of a page, decompressed, kilobytes of 2**10 bytes."""
    max_per_host: int = Field(default=4, ge=1)
    """Connections to one host at once, of each replica."""
    user_agent: str = "verl-tool"
    """As which it asks."""
    allow_private_addresses: bool = False
    """Read pages of private networks and of this machine too."""
    isolation: str = Level.full.name
    """The lowest level of isolation of the reader with which the tool agrees to start."""
    workers: int | None = Field(default=None, ge=1)
    """Processes that readers are forked from; None: one a core."""


class WebPageArguments(BaseModel):
    model_config = ConfigDict(extra="forbid")

    url: str = Field(description="address of the page", min_length=1)
    page: int = Field(default=1, ge=1, description="which part of a long text")
    links: bool = Field(default=False, description="true shows the page's links in place of its text")


class WebPageTool(Tool):
    """One pool of connections, and one sandbox pool that reads."""

    name = "web_page"
    aliases = ("visit", "read_page")
    description = "Reads a page of the web by its address and returns its text, part by part, or its links."
    Arguments = WebPageArguments
    example_actions = (
        "<web_page>https://example.org</web_page>",
        '<tool_call>\n{"name": "web_page", "arguments": {"url": "https://example.org", "page": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "web_page", "arguments": {"url": "https://example.org", "links": true}}\n</tool_call>',
    )
    Options = WebPageOptions
    options: WebPageOptions
    _readers: SandboxPool | None = None
    """Not `sandbox`, which is lent to ``POST /run_code``: whoever serves pages does not mean to run programs."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        chosen = self.options
        self._level = Level.parse(chosen.isolation)
        self._store = chosen.new_store()
        self._reading = asyncio.Semaphore(chosen.max_concurrent)
        self._client = PageClient(
            user_agent=chosen.user_agent,
            max_bytes=chosen.max_kilobytes << 10,
            max_concurrent=chosen.max_concurrent,
            max_per_host=chosen.max_per_host,
            allow_private_addresses=chosen.allow_private_addresses,
        )

    async def start(self) -> None:
        """Raises StartError, and as `SandboxPool.start`. With replay, nothing is read, so no sandbox is needed."""
        self._store.start()
        if self.options.replay:
            return
        readers = new_pool(self.options.workers, self._level)
        await readers.start()
        self._readers = readers

    async def check(self) -> None:
        if self._readers is not None:
            await self._readers.check()

    def isolation_in_force(self) -> str:
        return "" if self._readers is None else self._readers.level.describe()

    async def close(self) -> None:
        await self._store.close()
        await self._client.close()
        if self._readers is not None:
            await self._readers.close()

    async def run(self, call: Call, context: Context) -> ToolResult:
        arguments = self._arguments(call)
        try:
            url = str(checked_url(arguments.url))
            answer = await self._store.answer({"page": url}, lambda: self._get(url))
            if "refused" in answer:
                raise PageUnavailableError(answer["refused"])
        except (PageUnavailableError, NotRecorded) as error:
            words = str(error) if isinstance(error, PageUnavailableError) else _NOT_RECORDED
            missed = float(isinstance(error, NotRecorded))
            text = f"{arguments.url[:200]} cannot be read: {words}."
            return ToolResult(text, error=True, metrics={"pages": 0.0, "not_recorded": missed})
        found = Readable(**answer)
        text = self._links(found, arguments.page) if arguments.links else self._text(found, arguments.page)
        return ToolResult(text, metrics={"pages": 1.0, "not_recorded": 0.0})

    def _arguments(self, call: Call) -> WebPageArguments:
        """A text is the address, unless it is JSON."""
        text = call.input.strip()
        if call.arguments is None and not text.startswith("{"):
            if not text:
                raise InvalidCall("write the address of the page")
            return WebPageArguments(url=text)
        found: WebPageArguments = self.arguments(call)
        return found

    async def _get(self, url: str) -> dict[str, Any]:
        """What is kept of a page. Raises PageUnavailableError where another try may find it."""
        if self._readers is None:
            raise SandboxError(f"{self.name} has not been started", retryable=True)
        await self._place()
        try:
            page = await self._client.get(url, self.options.timeout_seconds)
            return asdict(await readable(page, self._readers))
        except PageUnavailableError as error:
            if not error.lasting:
                raise
            return {"refused": str(error)}
        finally:
            self._reading.release()

    async def _place(self) -> None:
        """Among those that are read at once. Raises ToolFault."""
        try:
            await asyncio.wait_for(self._reading.acquire(), QUEUE_SECONDS)
        except asyncio.TimeoutError as error:
            words = f"no place for a page within {QUEUE_SECONDS:g} s; raise max_concurrent"
            raise ToolFault(FaultKind.OVERLOADED, words, retryable=True) from error

    def _text(self, found: Readable, number: int) -> str:
        parts = _parts(found.text, self.options.part_length)
        return _part(found, parts, number, "part", "(there is no text on it)")

    def _links(self, found: Readable, number: int) -> str:
        lines = [f"[{words}]({target})" for words, target in found.links]
        parts = ["\n".join(lines[i : i + LINKS_OF_PART]) for i in range(0, len(lines), LINKS_OF_PART)]
        return _part(found, parts, number, "links, part", "(there are no links on it)")


def _part(found: Readable, parts: list[str], number: int, what: str, nothing: str) -> str:
    head = "\n".join(line for line in (found.title, found.url) if line)
    if not parts:
        return f"{head}\n\n{nothing}"
    if number > len(parts):
        return f"{head}\n\n(there is no {what} {number}; the last one is {len(parts)})"
    more = f'\n\n(go on with "page": {number + 1})' if number < len(parts) else ""
    return f"{head} ({what} {number} of {len(parts)})\n\n{parts[number - 1]}{more}"


def _parts(text: str, length: int) -> list[str]:
    """Pieces of at most `length` characters that end with a paragraph, a line or a word where they can."""
    parts = []
    text, at = text.strip(), 0
    while len(text) - at > length:
        ends = (text.rfind(end, at + length // 2, at + length) for end in ("\n\n", "\n", " "))
        cut = next((end for end in ends if end > 0), at + length)
        parts.append(text[at:cut].rstrip())
        following = _SOLID.search(text, cut)
        at = following.start() if following is not None else len(text)
    return [*parts, text[at:]] if at < len(text) else parts
