from __future__ import annotations

import pytest

from benchmarks.environments_served import call_directly, cell_of, running
from verl_tool.servers.tools import load_tools


def test_a_cell_has_the_rate_and_the_durations():
    cell = cell_of("echo", 2, 0.5, 2.0, [1.0, 2.0, 3.0, 100.0])
    assert (cell.steps_a_second, cell.median_ms, cell.load) == (2.0, 2.5, 0.5)
    assert 3.0 < cell.p99_ms <= 100.0


async def test_the_tool_server_is_measured_without_the_adapter(servers):
    server = await servers.start(load_tools("calculator"))
    cell = await call_directly(server.url, "calculator", {"expression": "6*7"}, 2, 0.2)
    assert cell.name == "calculator, ToolClient"
    assert cell.steps_a_second > 0


def test_a_server_that_does_not_start_is_named(tmp_path):
    with (
        pytest.raises(SystemExit, match=r"does not serve:\nbroken"),
        running(["sh", "-c", "echo broken; exit 1"], "http://127.0.0.1:1", tmp_path / "log"),
    ):
        pass
