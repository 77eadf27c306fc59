"""Which requests take the short way into a replica's app, and what a stranger's or nobody's get."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private.http_util import (
    call_function_from_import_path,
    validate_http_proxy_callback_return,
)

from verl_tool.servers.api.http import path_of
from verl_tool.servers.serve import serve_bypass


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch):
    """A function from a request's type and path to the app that it reaches: ``serve`` or ``ours``."""
    monkeypatch.setattr(serve_bypass, "_here", None)
    monkeypatch.setattr(serve_bypass.serve, "get_replica_context", lambda: None)
    (middleware,) = validate_http_proxy_callback_return(call_function_from_import_path(serve_bypass.CALLBACK))
    reached: list[str] = []

    def app(name: str):
        async def serve(scope, receive, send) -> None:
            reached.append(name)

        return serve

    bypass = middleware.cls(app("serve"), *middleware.args, **middleware.kwargs)

    async def ask(path: str, kind: str = "http") -> str:
        await bypass({"type": kind, "path": path, "headers": []}, None, None)
        return reached.pop()

    ask.offer = lambda: serve_bypass.offer(app("ours"), "tools")  # type: ignore[attr-defined]
    return ask


async def test_without_an_app_all_is_left_to_serve(taken) -> None:
    assert await taken("/get_observation") == "serve"


@pytest.mark.parametrize("path", ["/get_observation", "/", "/-", "/nothing"])
async def test_requests_go_to_the_app(taken, path: str) -> None:
    taken.offer()
    assert await taken(path) == "ours"


@pytest.mark.parametrize("path", ["/-/healthz", "/-/routes"])
async def test_serves_own_routes_stay_serves(taken, path: str) -> None:
    taken.offer()
    assert await taken(path) == "serve"


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_other_connections_stay_serves(taken, kind: str) -> None:
    taken.offer()
    assert await taken("/get_observation", kind) == "serve"


class Answers:
    """What a middleware sends, and what the app behind it was asked."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.scopes: list[dict[str, Any]] = []

    async def app(self, scope, receive, send) -> None:
        self.scopes.append(scope)

    async def send(self, message) -> None:
        self.sent.append(message)

    async def ask(self, middleware, path: str, **headers: str) -> int | None:
        """The status with which the middleware answered by itself."""
        named = [(name.encode(), value.encode()) for name, value in headers.items()]
        await middleware({"type": "http", "path": path, "headers": named}, None, self.send)
        return self.sent[0]["status"] if self.sent else None


@pytest.mark.parametrize(("front", "status"), [("mine/http-tools", None), ("theirs/http-tools", 421), (None, 421)])
async def test_a_request_through_another_front_is_refused(monkeypatch, front: str | None, status: int | None) -> None:
    monkeypatch.setenv(serve_bypass.FRONT_VARIABLE, "mine")
    monkeypatch.setattr(serve_bypass, "_here", None)
    answers = Answers()
    serve_bypass.offer(answers.app, "tools")
    headers = {} if front is None else {serve_bypass.INGRESS_HEADER: front}
    assert await answers.ask(serve_bypass.ServeBypass(answers.app), "/health", **headers) == status
    assert len(answers.scopes) == (status is None)


async def test_an_app_below_a_prefix_finds_its_paths(monkeypatch) -> None:
    monkeypatch.setattr(serve_bypass, "_here", None)
    answers = Answers()
    serve_bypass.offer(answers.app, "tools", "/train/a")
    await answers.ask(serve_bypass.ServeBypass(answers.app), "/train/a/health")
    assert path_of(answers.scopes[0]) == "/health"


async def test_the_proxy_without_replicas_says_so_at_once(monkeypatch) -> None:
    # Where there is no HAProxy, the proxy is the way to the replicas.
    assert serve_bypass.middlewares() == []
    monkeypatch.setenv(serve_bypass.FRONT_VARIABLE, "mine")
    (middleware,) = serve_bypass.middlewares()
    answers = Answers()
    proxy = middleware.cls(answers.app)
    assert await answers.ask(proxy, "/get_observation") == 503
    assert (b"retry-after", b"1") in answers.sent[0]["headers"]
    # By Serve's own route HAProxy learns that the proxy lives.
    healthy = Answers()
    assert await healthy.ask(middleware.cls(healthy.app), "/-/healthz") is None
    assert len(healthy.scopes) == 1
