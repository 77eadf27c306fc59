"""Which requests take the short way into a replica's app."""

from __future__ import annotations

import pytest
from ray.serve._private.http_util import (
    call_function_from_import_path,
    validate_http_proxy_callback_return,
)

from verl_tool.servers import short_path


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch):
    """A function from a request's type and path to the app that it reaches: ``serve`` or ``ours``."""
    monkeypatch.setattr(short_path, "_app_here", None)
    (middleware,) = validate_http_proxy_callback_return(call_function_from_import_path(short_path.CALLBACK))
    reached: list[str] = []

    def app(name: str):
        async def serve(scope, receive, send) -> None:
            reached.append(name)

        return serve

    door = middleware.cls(app("serve"), *middleware.args, **middleware.kwargs)

    async def ask(path: str, kind: str = "http") -> str:
        await door({"type": kind, "path": path}, None, None)
        return reached.pop()

    ask.offer = lambda: short_path.offer(app("ours"))  # type: ignore[attr-defined]
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
