"""The tool server's client."""

from verl_tool.client.tool_client import ToolClient

__all__ = ["ToolClient"]
