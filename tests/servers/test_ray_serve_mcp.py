"""``--mcp`` and ``--mcp_check`` of the command, as a user runs it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import toy_mcp_server
import typer
from server_command import STOP_SECONDS, gone, start
from toy_mcp import entry as toy
from toy_mcp import programs

from verl_tool.client import ToolClient
from verl_tool.servers.ray_serve import serve_tools

PAGE = Path(__file__).parents[2] / "assets" / "docs" / "mcp.md"


def servers_file(folder: Path, **servers: Any) -> str:
    file = folder / "servers.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    return str(file)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """Exit code and what is printed, without a process of its own."""
    app = typer.Typer()
    app.command()(serve_tools)
    code = typer.main.get_command(app).main(list(arguments), standalone_mode=False)
    return code, capsys.readouterr().err


def test_the_check_lists_what_there_is_and_fails_for_what_cannot_be_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = toy(disabled=True)
    code, said = command(capsys, "--mcp_check", "--mcp", servers_file(tmp_path, one=toy(), off=off))
    assert code == 0, said
    assert "echo(text)" in said
    assert "disabled" in said
    there = servers_file(tmp_path, one=toy(), two=toy("exit"), three={"url": "http://[::1]:9/x"})
    code, said = command(capsys, "--mcp_check", "--mcp", there)
    assert code == 1, said
    assert "MCP server two cannot be reached" in said
    assert "cannot find my database" in said
    assert "MCP server three cannot be reached" in said
    assert "echo(text)" in said


def test_the_example_of_the_docs_is_served_from_the_sandbox(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Train with MCP tools\n")[2]
    for kind, file in (("python", "double.py"), ("json", "servers.json")):
        (tmp_path / file).write_text(section.partition(f"```{kind}\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    code, said = command(capsys, "--mcp_check", "--mcp", "servers.json")
    assert code == 0, said
    assert "mcp__numbers__double" in said


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["--mcp_check"], "--mcp_check looks at the servers of --mcp"),
        (["--mcp", str(tmp_path / "none.json")], "cannot be read"),
        (["--mcp", servers_file(tmp_path, x={"comand": "y"})], "mcpServers.x.comand"),
    ):
        code, said = command(capsys, "--embedded", *arguments)
        assert (code, told in " ".join(said.split())) == (2, True), said
    code, said = command(capsys, "--embedded", "--mcp", servers_file(tmp_path, x=toy("exit")))
    assert (code, "MCP server x cannot be reached" in " ".join(said.split())) == (1, True), said


@pytest.mark.slow
async def test_it_serves_tools_of_both_kinds_and_is_an_mcp_server_itself(tmp_path: Path) -> None:
    from mcp import Client

    for server in start(
        tmp_path, "--embedded", "--tool_type", "calculator", "--mcp", servers_file(tmp_path, toy=toy(stateful=False))
    ):
        server.wait_until_ready()
        async with ToolClient(server.url) as client:
            action = '<tool_call>\n{"name": "mcp__toy__echo", "arguments": {"text": "hi"}}\n</tool_call>'
            assert "echo: hi" in (await client.call("a", action, step=0)).observation
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/tools") as answer:
            described = {tool["name"]: tool for tool in (await answer.json())["tools"]}
            assert described["mcp__toy__echo"]["parameters"] == toy_mcp_server.TEXT
        async with Client(f"{server.url}/mcp") as mcp_client:
            assert {tool.name for tool in (await mcp_client.list_tools()).tools} == set(described)
            through = await mcp_client.call_tool("mcp__toy__echo", {"text": "there and back"})
            assert through.content[0].text == "echo: there and back"
        family = server.family()
        assert programs(psutil.Process(server.process.pid))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=STOP_SECONDS) == 0
        assert gone(family, seconds=10) == []
