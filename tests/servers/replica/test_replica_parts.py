"""What a replica tells of its parts."""

from __future__ import annotations

from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.replica.replica_parts import isolation_of
from verl_tool.servers.tools import load_tools


def test_the_isolation_of_each_tool_is_told_once() -> None:
    tools = load_tools("sandbox_fusion,piston,calculator")
    told = "that of SandboxFusion at http://127.0.0.1:8080; that of Piston at http://127.0.0.1:2000/api/v2"
    assert isolation_of(ToolSet(tools)) == told
    assert isolation_of(ToolSet(load_tools("calculator"))) == ""
