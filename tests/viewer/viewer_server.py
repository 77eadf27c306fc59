"""The viewer in a thread of the tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from verl_tool.servers.api.host_check import HostCheck
from verl_tool.viewer.run_watch import RunWatch
from verl_tool.viewer.token_texts import TokenTexts
from verl_tool.viewer.viewer_app import application


@contextmanager
def viewer(*roots: Path) -> Iterator[str]:
    """The URL of a viewer that serves the runs below `roots`."""
    app = application(RunWatch(roots), TokenTexts(), HostCheck("127.0.0.1", None))
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
