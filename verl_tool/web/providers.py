"""Requests to search providers, and parsing of their answers.

Sources, as of November 2026: serper.dev's playground and OpenAPI; Brave's "Web search" reference; Tavily's "Search" and
"Errors"; Bright Data's "SERP API" (Bing); SearXNG's "Search API".
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

_EMPHASIS = re.compile(r"</?(?:strong|b|em|mark)>")
_SPACES = re.compile(r"\s+")


class OddAnswer(Exception):
    """An answer does not have the provider's format. The message says what is missing."""


class FailedEngines(Exception):
    """A metasearch engine found nothing because the engines that it uses failed."""


@dataclass(frozen=True)
class WebHit:
    title: str
    url: str
    text: str


@dataclass(frozen=True)
class Wish:
    """Parameters of a search."""

    query: str
    count: int
    """Maximum number of pages."""
    location: str
    """Country, as two letters."""
    language: str
    """Language, such as ``en``."""
    zone: str
    """Name of the subscription at Bright Data."""


@dataclass(frozen=True)
class Ask:
    """One HTTP request, without the key."""

    path: str
    body: Mapping[str, Any] | None = None

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"


@dataclass(frozen=True)
class Provider:
    url: str
    """URL of the service, empty if each user has one of their own."""
    key_variables: tuple[str, ...]
    """Environment variables that may contain the key, empty if it needs no key."""
    key_header: str
    """Header for the key, which is a bearer token in ``authorization``."""
    query_characters: int
    """Maximum number of characters of a query."""
    query_words: int
    """Maximum number of words of a query."""
    max_hits: int
    """Maximum number of hits of one request."""
    ask: Callable[[Wish], Ask]
    read: Callable[[Any], list[WebHit]]
    """Parses an answer. Raises OddAnswer and FailedEngines."""


def _ask_serper(wish: Wish) -> Ask:
    body = {"q": wish.query, "gl": wish.location, "hl": wish.language, "num": wish.count}
    return Ask("/search", body)


def _read_serper(answer: Any) -> list[WebHit]:
    found = _list(answer, "organic", "searchParameters")
    return [_hit(each, "title", "link", "snippet") for each in found]


def _ask_brave(wish: Wish) -> Ask:
    params = {
        "q": wish.query,
        "count": wish.count,
        "country": wish.location.upper(),
        "search_lang": wish.language,
        "text_decorations": "false",
        "result_filter": "web",
    }
    return Ask(f"/res/v1/web/search?{_encoded(params)}")


def _read_brave(answer: Any) -> list[WebHit]:
    web = answer.get("web") if isinstance(answer, dict) else None
    if web is None and isinstance(answer, dict) and "query" in answer:
        return []
    return [_hit(each, "title", "url", "description") for each in _list(web, "results")]


def _ask_tavily(wish: Wish) -> Ask:
    return Ask("/search", {"query": wish.query, "max_results": wish.count, "search_depth": "basic"})


def _read_tavily(answer: Any) -> list[WebHit]:
    return [_hit(each, "title", "url", "content") for each in _list(answer, "results")]


def _ask_brightdata(wish: Wish) -> Ask:
    market = f"{wish.language}-{wish.location.upper()}"
    params = {"q": wish.query, "mkt": market, "setLang": wish.language, "cc": wish.location, "brd_json": 1}
    url = f"https://www.bing.com/search?{_encoded(params)}"
    return Ask("/request", {"zone": wish.zone, "url": url, "format": "raw"})


def _read_brightdata(answer: Any) -> list[WebHit]:
    found = _list(answer, "organic", "general")
    return [_hit(each, "title", "link", "description") for each in found]


def _ask_searxng(wish: Wish) -> Ask:
    return Ask(f"/search?{_encoded({'q': wish.query, 'format': 'json', 'language': wish.language})}")


def _read_searxng(answer: Any) -> list[WebHit]:
    found = _list(answer, "results")
    failed = answer.get("unresponsive_engines")
    if not found and isinstance(failed, list) and failed:
        raise FailedEngines(f"found nothing, and engines that it asks failed: {str(failed)[:300]}")
    return [_hit(each, "title", "url", "content") for each in found]


PROVIDERS: Mapping[str, Provider] = {
    "serper": Provider(
        "https://google.serper.dev", ("SERPER_API_KEY",), "x-api-key", 2000, 2000, 100, _ask_serper, _read_serper
    ),
    "brave": Provider(
        "https://api.search.brave.com",
        ("BRAVE_API_KEY", "BRAVE_SEARCH_API_KEY"),
        "x-subscription-token",
        *(400, 50, 20),
        _ask_brave,
        _read_brave,
    ),
    "tavily": Provider(
        "https://api.tavily.com", ("TAVILY_API_KEY",), "authorization", 400, 400, 20, _ask_tavily, _read_tavily
    ),
    "brightdata": Provider(
        "https://api.brightdata.com",
        ("BRIGHTDATA_API_KEY",),
        "authorization",
        *(1000, 1000, 50),
        _ask_brightdata,
        _read_brightdata,
    ),
    "searxng": Provider("", (), "authorization", 2000, 2000, 100, _ask_searxng, _read_searxng),
}


def _encoded(asked: Mapping[str, object]) -> str:
    return urlencode(asked, errors="replace")


def _list(answer: Any, key: str, of_any: str | None = None) -> list[Any]:
    """The list at `key`; empty where it is left out of an answer that has `of_any`, as every answer of its form."""
    if not isinstance(answer, dict):
        raise OddAnswer(f"it is no object but {type(answer).__name__}")
    found = answer.get(key)
    if found is None and of_any is not None and of_any in answer:
        return []
    if not isinstance(found, list):
        raise OddAnswer(f"it has no list {key!r}; its keys: {', '.join(map(str, answer))[:200]}")
    return found


def _hit(found: Any, title: str, url: str, text: str) -> WebHit:
    if not isinstance(found, dict) or not isinstance(found.get(url), str):
        raise OddAnswer(f"what it found has no text {url!r}")
    return WebHit(_plain(found.get(title)), found[url], _plain(found.get(text)))


def _plain(text: object) -> str:
    """On one line, without the marks of emphasis that some providers leave in."""
    return _SPACES.sub(" ", html.unescape(_EMPHASIS.sub("", text))).strip() if isinstance(text, str) else ""
