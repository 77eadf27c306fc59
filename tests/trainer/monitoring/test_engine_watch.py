"""Engines that are looked after."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, Queue

import pytest

from verl_tool.trainer.monitoring.engine_watch import EngineLostError, EngineWatch


@contextmanager
def engine(status: Callable[[], int]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Address of a server that answers `/health` so, and what ends it."""

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status() if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()

    try:
        yield f"127.0.0.1:{server.server_port}", end
    finally:
        end()
        thread.join()


@contextmanager
def watching(*addresses: str) -> Iterator[Queue[EngineLostError]]:
    lost: Queue[EngineLostError] = Queue()
    watch = EngineWatch(addresses, lost.put, interval=0.05)
    watch.start()
    try:
        yield lost
    finally:
        watch.stop()


def test_a_dead_engine_is_named():
    states = {"one": 200, "two": 200}
    with (
        engine(lambda: states["one"]) as (one, _),
        engine(lambda: states["two"]) as (two, _),
        watching(one, two) as lost,
    ):
        with pytest.raises(Empty):
            lost.get(timeout=0.5)
        states["two"] = 503
        assert f"the rollout engine behind {two} died" in str(lost.get(timeout=10))


def test_a_server_that_is_gone_is_named():
    with engine(lambda: 200) as (address, end), watching(address) as lost:
        with pytest.raises(Empty):
            lost.get(timeout=0.3)
        end()
        assert f"{address} is gone" in str(lost.get(timeout=10))


@pytest.mark.parametrize("status", [200, 404, 500])
def test_other_answers_are_signs_of_life(status):
    with engine(lambda: status) as (address, _), watching(address) as lost, pytest.raises(Empty):
        lost.get(timeout=0.5)
