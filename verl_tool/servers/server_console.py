"""What a tool server says to whoever started it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shlex
from collections.abc import Sequence

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_tool.errors import VerlToolError
from verl_tool.http.host_check import is_loopback
from verl_tool.servers.mcp.catalog import ask_all
from verl_tool.servers.mcp.config import McpConfig
from verl_tool.servers.replica.replica_parts import make_tools
from verl_tool.servers.settings import ReplicaSettings
from verl_tool.servers.tools import inactive_tools
from verl_tool.servers.tools.base import Tool

console = Console(stderr=True)
_CHECK_COMMANDS = {"python_code": "python", "sql": "sql --db_id=ID"}
"""What stands behind the module of a tool's check, where that is not the tool's name alone."""


def print_start_table(settings: ReplicaSettings, *, isolation: str, runs_on: str, url: str) -> None:
    """Tools, isolation, where it runs, and a command to try it. `url`: base URL of the server."""
    table = Table("tool", "serves", "how it is called", title="verl-tool")
    tools = make_tools(settings)
    for tool in tools:
        example = tool.example_actions[0] if tool.example_actions else ""
        table.add_row(tool.name, "[green]yes[/green]", example.replace("[", "\\["))
    for absent in inactive_tools(tools, settings.tool_config):
        table.add_row(absent.name, "no", absent.why)
    console.print(table)
    console.print(f"isolation   {isolation or 'none needed: no tool runs code'}", highlight=False)
    console.print(f"runs on     {runs_on}", highlight=False)
    print_address(f"{url}/get_observation", settings.listen_host, settings.api_key)
    if tried := way_to_try(tools, f"{url}/get_observation"):
        console.print(f"try         {tried}", soft_wrap=True, highlight=False, markup=False)


def check_servers(config: McpConfig, isolation: str | None) -> bool:
    """Say what each MCP server offers; whether all could be reached. Raises ConfigError."""
    table = Table("MCP server", "by", "clients", "offers", title="verl-tool --mcp_check")
    problems: list[VerlToolError] = []
    for name, found in asyncio.run(ask_all(config, isolation)).items():
        server = config.mcpServers[name]
        by = (
            server.transport
            if server.transport != "stdio"
            else f"stdio, {'in' if server.sandbox else 'outside'} the sandbox"
        )
        clients = "one a trajectory" if server.stateful else "one for all"
        if isinstance(found, VerlToolError):
            problems.append(found)
            table.add_row(name, by, clients, "[bold red]see below[/bold red]")
            continue
        offered = [f"{offer.name}({', '.join(offer.parameters.get('properties', {}))})" for offer in found]
        table.add_row(name, by, clients, escape("\n".join(offered)) or "[red]no tool[/red]")
    for name in sorted(set(config.mcpServers) - set(config.enabled())):
        table.add_row(name, config.mcpServers[name].transport, "", "disabled")
    console.print(table)
    for problem in problems:
        console.print(f"[bold red]{escape(str(problem))}[/bold red]", soft_wrap=True, highlight=False)
    return not problems


def print_address(url: str, host: str, api_key: str | None) -> None:
    """Where it serves, and whether anybody on the network may use it."""
    if not is_loopback(host) and api_key is None:
        console.print(f"[bold yellow]open to the network[/bold yellow] ({host}) without --api_key")
    console.print(f"serves at   {url}", highlight=False)


def describe_error(error: VerlToolError | ValidationError) -> str:
    """In the words of the command line."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"--{'.'.join(str(part) for part in problem['loc'])} is {problem['input']!r}: {problem['msg']}"
    return str(error)


def way_to_try(tools: Sequence[Tool], url: str) -> str:
    """A command that asks the first tool: its check, if it has one here, else one of its examples."""
    first = tools[0]
    check = f"verl_tool.servers.tests.test_{first.name}_tool"
    if importlib.util.find_spec(check) is not None:
        return f"python -m {check} {_CHECK_COMMANDS.get(first.name, first.name)} --url={url}"
    if not first.example_actions:
        return ""
    body = json.dumps({"trajectory_ids": ["a"], "actions": [first.example_actions[0]]}, ensure_ascii=False)
    return f"curl -s {url} -d {shlex.quote(body)}"
