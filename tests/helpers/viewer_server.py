"""The viewer in a thread of the tests, and an endpoint for its live page in another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import uvicorn

from verl_tool.http.host_check import HostCheck
from verl_tool.viewer.branch_jobs import BranchJobs
from verl_tool.viewer.endpoint_proxy import EndpointProxy
from verl_tool.viewer.run_watch import RunWatch
from verl_tool.viewer.token_texts import TokenTexts
from verl_tool.viewer.viewer_app import application

Value = TypeVar("Value")


@contextmanager
def viewer(
    *roots: Path, endpoint: EndpointProxy | None = None, branch_options: Sequence[str] | None = None
) -> Iterator[str]:
    """Serve the runs below `roots` and yield the URL. `branch_options` are those of `BranchJobs`."""
    watch = RunWatch(roots)
    branches = BranchJobs(watch, branch_options)
    app = application(watch, TokenTexts(), HostCheck("127.0.0.1", None), endpoint, branches)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def in_a_thread(context: AbstractAsyncContextManager[Value]) -> Iterator[Value]:
    """Enter `context` in a thread with its own event loop, since tests of pages wait for a browser."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        value = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(60)
        try:
            yield value
        finally:
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
