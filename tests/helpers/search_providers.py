"""Stand-ins for the search providers, each as its documentation says, and for a few pages of the web."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from aiohttp import web
from local_server import LocalServer

KEYS = {"serper": "SERPER_API_KEY", "brave": "BRAVE_API_KEY", "tavily": "TAVILY_API_KEY"}
KEYS["brightdata"] = "BRIGHTDATA_API_KEY"
KEY = "k3y-of-the-test"
QUERY, NOTHING = "harbour of Sandmouth", "zzz"
ARTICLE = "".join(
    f"<p>Paragraph {n} tells of the harbour of Sandmouth, which Mira Tolk painted in the year {1800 + n}, and of its "
    "boats, which left each morning before the sun had risen over the grey hills.</p>"
    for n in range(40)
)
HTML = (
    "<html><head><title>The harbour of Sandmouth</title></head><body><nav><a href='/menu'>Menu</a></nav><article>"
    f"<h1>The harbour</h1>{ARTICLE}<p>See <a href='other?a=1#part'>the other page</a>.</p></article></body></html>"
)
_FOUND = ("The harbour of Sandmouth", "https://sandmouth.example/harbour", "Mira Tolk painted it &amp; more.")


class Providers(LocalServer):
    """The four search providers."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        """Received searches: provider, query, count."""
        self.instead: list[web.Response] = []
        """Answers that replace the next ones."""
        self.delay = 0.0

    def routes(self) -> list[web.RouteDef]:
        # Serper and Tavily, and SearXNG by GET, have one path.
        return [
            web.post("/search", self._told(self._post_search)),
            web.get("/search", self._told(self._searxng)),
            web.get("/res/v1/web/search", self._told(self._brave)),
            web.post("/request", self._told(self._brightdata)),
        ]

    def _told(self, handler: Callable[[web.Request], Awaitable[web.Response]]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            await asyncio.sleep(self.delay)
            told = await handler(request)
            return self.instead.pop(0) if self.instead else told

        return answer

    async def _post_search(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.headers.get("Authorization"):
            return self._tavily(request, body)
        if request.headers.get("X-API-KEY") != KEY:
            return web.json_response({"message": "Unauthorized.", "statusCode": 403}, status=403)
        self._note("serper", body["q"], body["num"])
        title, link, snippet = _FOUND
        organic = [{"title": title, "link": link, "snippet": snippet, "position": 1}]
        return web.json_response(
            {
                "searchParameters": {"q": body["q"], "gl": body["gl"], "hl": body["hl"], "type": "search"},
                "knowledgeGraph": {"title": "Sandmouth"},
                "organic": organic if body["q"] != NOTHING else [],
                "credits": 1,
            }
        )

    def _tavily(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {KEY}":
            return web.json_response({"detail": {"error": "Unauthorized: missing or invalid API key."}}, status=401)
        self._note("tavily", body["query"], body["max_results"])
        title, url, content = _FOUND
        found = [{"title": title, "url": url, "content": content, "score": 0.9, "raw_content": None}]
        results = found if body["query"] != NOTHING else []
        return web.json_response({"query": body["query"], "answer": None, "results": results, "response_time": 0.8})

    async def _brave(self, request: web.Request) -> web.Response:
        if request.headers.get("X-Subscription-Token") != KEY:
            told = {"code": "SUBSCRIPTION_TOKEN_INVALID", "detail": "The token is invalid.", "status": 422}
            return web.json_response({"type": "ErrorResponse", "error": told}, status=401)
        query = request.query["q"]
        self._note("brave", query, int(request.query["count"]))
        title, url, description = _FOUND
        web_part = {
            "type": "search",
            "results": [{"title": title, "url": url, "description": f"<strong>{description}"}],
        }
        told = {"type": "search", "query": {"original": query}}
        return web.json_response(told | ({"web": web_part} if query != NOTHING else {}))

    async def _brightdata(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(text="Invalid token", status=401)
        body = await request.json()
        asked = parse_qs(urlsplit(body["url"]).query)
        assert (body["format"], asked["brd_json"], urlsplit(body["url"]).hostname) == ("raw", ["1"], "www.bing.com")
        self._note("brightdata", asked["q"][0], 0)
        title, link, description = _FOUND
        organic = [{"link": link, "title": title, "description": description, "rank": 1, "global_rank": 1}]
        told = {"general": {"search_engine": "bing", "query": asked["q"][0]}, "input": {}}
        # What a request with format raw answers with has no type of JSON.
        found = web.json_response(told | ({"organic": organic} if asked["q"] != [NOTHING] else {}))
        found.content_type = "text/plain"
        return found

    async def _searxng(self, request: web.Request) -> web.Response:
        if request.query.get("format") != "json":
            return web.Response(status=403, text="Forbidden")
        query = request.query["q"]
        self._note("searxng", query, 0)
        title, url, content = _FOUND
        found = [{"url": url, "title": title, "content": content, "engine": "bing", "engines": ["bing"], "score": 1.0}]
        results = found if query not in (NOTHING, "broken") else []
        failed = [["bing", "timeout"]] if query == "broken" else []
        told = {"query": query, "number_of_results": 0, "results": results, "answers": [], "suggestions": []}
        return web.json_response(told | {"unresponsive_engines": failed})

    def _note(self, provider: str, query: str, count: int) -> None:
        self.asked.append({"provider": provider, "query": query, "count": count})


class Pages(LocalServer):
    """A few pages of the web."""

    def __init__(self, files: Mapping[str, tuple[bytes, str]] | None = None) -> None:
        """`files` are further ones by name, with their media types."""
        self.files = dict(files or {})
        self.asked: list[str] = []
        self.busy = 0
        """How often ``/busy`` refuses before it answers."""

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/{name:.*}", self._page)]

    async def _page(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.asked.append(name)
        if name in self.files:
            body, kind = self.files[name]
            return web.Response(body=body, content_type=kind)
        if name == "article":
            return web.Response(text=HTML, content_type="text/html")
        if name == "latin1":
            body = "<html><body><p>Größe und Maß der Brücke über den Fluß.</p></body></html>".encode("latin-1")
            return web.Response(body=body, headers={"content-type": "text/html; charset=iso-8859-1"})
        if name == "plain":
            return web.Response(text="plain words")
        if name == "pdf":
            return web.Response(body=b"%PDF-1.7", content_type="application/pdf")
        if name == "bomb":
            body = gzip.compress(b"a" * (64 << 20))
            return web.Response(body=body, headers={"content-encoding": "gzip", "content-type": "text/html"})
        if name == "slow":
            await asyncio.sleep(20)
        if name == "busy" and self.busy:
            self.busy -= 1
            return web.Response(status=429, headers={"retry-after": "0"})
        if name == "busy":
            return web.Response(text="at last")
        if name == "to":
            raise web.HTTPFound(request.query["where"])
        if name == "deep":
            return web.Response(text="<div>" * 60_000 + "deep", content_type="text/html")
        raise web.HTTPNotFound
