"""No request holds up the event loop: CPU time of its thread in one callback, which a busy machine does not change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hostile import MAX_CALLBACK_SECONDS, ask, longest_callback

from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.replica.asgi_app import ToolServerApp
from verl_tool.servers.tools import load_tools


def _body(entries: int, action: str, **further: Any) -> bytes:
    ids = [f"t{i}" for i in range(entries)]
    return json.dumps({"trajectory_ids": ids, "actions": [action] * entries, **further}).encode()


BODIES = {
    "openings in many entries": _body(400, "<calculator>}" * 146),
    "one long action of openings": _body(1, "<calculator>}" * 20_000),
    "one action of many calls": _body(1, "<calculator>1</calculator>" * 9_000),
    "many small entries": _body(2_000, "<calculator>1+1</calculator>"),
    "many numbers": _body(1, "x", extra_fields=[{"k": [1] * 90_000}]),
    "many objects": _body(1, "x", extra_fields=[{"k": [{}] * 30_000}]),
    "long texts": _body(8, "some text, [of] {code}\n" * 10_000),
}


@pytest.mark.parametrize("name", BODIES)
async def test_one_callback_is_short(name: str) -> None:
    toolset = ToolSet(load_tools("calculator,finish"))
    await toolset.start()
    app = ToolServerApp(toolset)
    with longest_callback() as longest:
        status, _, _ = await ask(app, "POST", "/get_observation", BODIES[name])
    await toolset.close()
    assert status == 200
    assert longest[0] < MAX_CALLBACK_SECONDS
