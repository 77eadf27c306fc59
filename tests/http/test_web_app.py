"""What holds for every route of a `WebApp`."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
from hostile import ask
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response

from verl_tool.http.messages import HttpError, JsonResponse
from verl_tool.http.metrics import HttpMetrics
from verl_tool.http.request_body import RequestBodies
from verl_tool.http.web_app import Request, WebApp


class Echo(WebApp):
    """Answers with what it was asked."""

    def __init__(self, **options: Any) -> None:
        self.registry = CollectorRegistry()
        self.answers: list[weakref.ref[Response]] = []
        routes = [
            ("POST", "/echo", self._echo),
            ("GET", "/named/{name:path}", self._name),
            ("GET", "/broken", self._break),
            ("GET", "/refused", self._refuse),
        ]
        super().__init__(routes, HttpMetrics(self.registry), RequestBodies(), **options)

    async def _echo(self, request: Request) -> Response:
        response = JsonResponse(json.loads(request.body))
        self.answers.append(weakref.ref(response))
        return response

    async def _name(self, request: Request) -> Response:
        return JsonResponse(request.path_params["name"])

    async def _break(self, request: Request) -> Response:
        raise KeyError("x")

    async def _refuse(self, request: Request) -> Response:
        raise HttpError(418, "teapot", "this is a teapot", "coffee", {"x-y": "z"})


@pytest.mark.parametrize("prefix", ["", "/below/a-prefix"])
@pytest.mark.parametrize("slash", ["", "/"])
async def test_a_prefix_and_a_closing_slash_mean_nothing(prefix: str, slash: str) -> None:
    app = Echo()

    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "root_path": prefix}, receive, send)

    status, headers, body = await ask(mounted, "POST", f"{prefix}/echo{slash}", b'{"a":1}')
    assert (status, body) == (200, b'{"a":1}')
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == b"7"
    assert (await ask(mounted, "GET", f"{prefix}/named/a/b{slash}"))[2] == b'"a/b"'


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "DELETE", "POST"])
async def test_no_other_method_than_the_routes_is_taken(method: str) -> None:
    status, headers, _ = await ask(Echo(), method, "/broken")
    assert (status, headers[b"allow"]) == (405, b"GET")


async def test_an_error_is_told_as_it_was_raised() -> None:
    status, headers, body = await ask(Echo(), "GET", "/refused")
    assert (status, headers[b"x-y"]) == (418, b"z")
    assert json.loads(body) == {"error": {"message": "this is a teapot", "type": "teapot", "field": "coffee"}}


async def test_a_bug_is_answered_and_its_text_kept_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app = Echo()
    status, _, body = await ask(app, "GET", "/broken")
    assert status == 500
    assert b"KeyError" not in body
    assert "KeyError" in caplog.text
    assert (await ask(app, "POST", "/echo", b"1"))[0] == 200


async def test_every_answer_bears_the_servers_names_and_what_is_for_others_is_refused() -> None:
    app = Echo(names={"x-server": "mine", "x-empty": ""})
    for path in ("/named/x", "/refused", "/nowhere"):
        headers = (await ask(app, "GET", path))[1]
        assert headers[b"x-server"] == b"mine"
        assert b"x-empty" not in headers
    assert (await ask(app, "GET", "/named/x", headers=[(b"x-server", b"theirs")]))[0] == 421
    assert (await ask(app, "GET", "/named/x", headers=[(b"x-server", b"mine")]))[0] == 200


async def test_metrics_name_the_route_and_never_the_path() -> None:
    app = Echo()
    await ask(app, "GET", "/named/secret")
    await ask(app, "POST", "/named/secret")
    await ask(app, "GET", "/secret")
    text = generate_latest(app.registry).decode()
    assert "secret" not in text
    for label in (
        'route="/named/{name:path}",status="200"',
        'route="/named/{name:path}",status="405"',
        'route="other"',
    ):
        assert label in text


async def test_a_request_leaves_nothing_for_the_garbage_collector() -> None:
    """Found only by it, thousands of requests would lie about, and to find them holds up the event loop."""
    app = Echo()
    gc.disable()
    try:
        await ask(app, "POST", "/echo", b"1")
        assert [answer() for answer in app.answers] == [None]
    finally:
        gc.enable()
