"""Which tool server the endpoint starts, and with what options."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_service.app import _tool_args, _tools_to_start
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.errors import ConfigError

SERVERS = Path("servers.json")


def test_mcp_servers_are_served_with_other_tools_or_alone() -> None:
    options = EpisodeOptions.load({"enable_agent": True, "enable_mtrl": True})
    assert _tools_to_start(options, None, SERVERS, None, False) == ""
    assert _tools_to_start(options, "calculator", SERVERS, None, False) == "calculator"
    with pytest.raises(ConfigError, match="no tool server"):
        _tools_to_start(options, None, None, None, False)
    with pytest.raises(ConfigError, match="--mcp starts a tool server and --tool_server_url names one"):
        _tools_to_start(options, None, SERVERS, None, True)


def test_files_are_passed_on() -> None:
    assert _tool_args(None, None, None, None) == ()
    assert _tool_args("x", Path("t.json"), SERVERS, None) == ("--tool_config", "t.json", "--mcp", "servers.json")
