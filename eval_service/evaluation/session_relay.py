"""What programs in the sandbox reach of an endpoint: the model routes of their own sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

import aiohttp
from prometheus_client import CollectorRegistry
from starlette.responses import Response

from verl_tool.client.exchange import TooLongError, read_bounded
from verl_tool.gateway.gateway_app import AGENT_ROUTES, MAX_BODY_BYTES, ONE_SESSION, SESSIONS_PATH
from verl_tool.http.event_stream import EventStream
from verl_tool.http.messages import HttpError
from verl_tool.http.metrics import HttpMetrics
from verl_tool.http.request_body import RequestBodies
from verl_tool.http.web_app import Request, WebApp

_ENDPOINTS_OWN = frozenset(
    (
        *("host", "connection", "content-length", "transfer-encoding", "accept-encoding", "expect", "upgrade", "te"),
        *("keep-alive", "origin", "cookie", "authorization", "x-api-key", "x-session-id"),
    )
)
"""Headers of a request that are not passed on."""
_PASSED_BACK = ("content-type", "retry-after")
_ANSWER_ROUTES = ("/chat/completions", "/responses", "/messages")
_MAX_ANSWER_BYTES = 64 << 20


@dataclass
class RemoteSession:
    """A session at the endpoint."""

    id: str
    key: str
    url: str
    """Of the process that has it."""
    failure: str | None = None
    """Why the endpoint could not be asked, if it was not since."""


class SessionRelay(WebApp):
    """Passes requests of `sessions` on to the endpoint over `http`, by their paths as at a `Gateway`."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.sessions: dict[str, RemoteSession] = {}
        """By id."""
        self._http = http
        routes = [(method, ONE_SESSION + path, partial(self._forward, method, path)) for method, path in AGENT_ROUTES]
        super().__init__(routes, HttpMetrics(CollectorRegistry()), RequestBodies(MAX_BODY_BYTES, 8 * MAX_BODY_BYTES))

    async def _forward(self, method: str, path: str, request: Request) -> Response:
        """The endpoint's answer. A program that leaves closes the connection to the endpoint, too."""
        if method == "HEAD":
            return Response()
        session = self._session(request)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers.items()}
        headers = {name: value for name, value in headers.items() if name not in _ENDPOINTS_OWN}
        headers["authorization"] = f"Bearer {session.key}"
        url = f"{session.url}{SESSIONS_PATH}/{session.id}{path}"
        try:
            answer = await self._http.request(
                method, url, data=request.body or None, headers=headers, allow_redirects=False
            )
            if answer.content_type == EventStream.media_type:
                parts = _parts(answer, session)
                return EventStream(await anext(parts), parts, _describe, end=b"")
            async with answer:
                body = await read_bounded(answer, _MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, asyncio.TimeoutError, TooLongError, StopAsyncIteration) as error:
            session.failure = f"the endpoint gave no answer: {error or type(error).__name__}"
            raise HttpError(502, "endpoint", session.failure) from None
        if path.endswith(_ANSWER_ROUTES):
            session.failure = None
        passed = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
        return Response(body, answer.status, passed)

    def _session(self, request: Request) -> RemoteSession:
        """The session of a request. Raises HttpError 401."""
        session = self.sessions.get(request.path_params["session_id"])
        if session is None:
            raise HttpError(401, "unauthorized", "no session that runs here has this path")
        return session


async def _parts(answer: aiohttp.ClientResponse, session: RemoteSession) -> AsyncGenerator[bytes, None]:
    """The events, as they come. Closed, it lets go of the endpoint."""
    async with answer:
        try:
            async for part in answer.content.iter_any():
                yield part
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            session.failure = f"the endpoint broke an answer off: {error or type(error).__name__}"
            raise
    session.failure = None


def _describe(error: Exception) -> tuple[int, object]:
    return 502, {"error": {"message": f"the endpoint broke this answer off: {type(error).__name__}"}}
