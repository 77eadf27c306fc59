"""`web_search` by the name that verl-tool gives it; the provider is Serper, unless the options choose another."""

from __future__ import annotations

from verl_tool.servers.tools.web_search import WebSearchTool


class GoogleSearchTool(WebSearchTool):
    name = "google_search"
    aliases = ("serp_search",)
    example_actions = (
        "<search>capital of France</search>",
        '<tool_call>\n{"name": "google_search", "arguments": {"queries": ["capital of France"]}}\n</tool_call>',
        "```search\ncapital of France\n```",
    )
