"""`web_search` by the name that verl-tool gives it; the provider is Bright Data, unless the options choose another."""

from __future__ import annotations

from verl_tool.servers.tools.web_search import WebSearchTool


class BingSearchTool(WebSearchTool):
    name = "bing_search"
    default_provider = "brightdata"
    example_actions = (
        "<search>capital of France</search>",
        '<tool_call>\n{"name": "bing_search", "arguments": {"queries": ["capital of France"]}}\n</tool_call>',
        "```search\ncapital of France\n```",
    )
