"""``python -m verl_tool.environments serve``, as a user runs it, with a reward manager of ours."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from listeners import Listeners
from served_episodes import QUESTION, row_file
from toy_tools import Ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMAND = [sys.executable, "-m", "verl_tool.environments"]
START_SECONDS = 400.0


@asynccontextmanager
async def serving(folder: Path, *arguments: str) -> AsyncIterator[str]:
    """Yield the URL at which the command serves. The tool server is in this process and answers meanwhile."""
    log, url_file = folder / "serve.log", folder / "url"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220
            [*COMMAND, "serve", *arguments, "--port", "0", "--url_file", str(url_file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
        )
    try:
        with Listeners(process.pid) as listeners:
            deadline = time.monotonic() + START_SECONDS
            while not url_file.exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                await asyncio.sleep(0.1)
            yield url_file.read_text()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 30) == 0, log.read_text()
        assert listeners.open_to_others == []
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


async def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run, [*COMMAND, *arguments], capture_output=True, text=True, timeout=100, check=False
    )


async def test_it_serves_rows_that_a_reward_manager_grades(servers, tmp_path):
    tool_server = await servers.start([Ledger()])
    rows = row_file(tmp_path, {**QUESTION, "ability": "math"})
    graded = "--rows", str(rows), "--reward_manager", "gsm8k", "--reward_option", "flexible=false"
    async with (
        serving(tmp_path, "openenv", "--tool_server", tool_server.url, *graded) as url,
        aiohttp.ClientSession() as http,
    ):
        rewards = []
        for answer in ("It is #### 42", "It is #### 17", "It is 42"):
            async with http.ws_connect(f"{url}/ws") as socket:
                await socket.send_json({"type": "reset"})
                await socket.receive_json()
                call = {"type": "call_tool", "tool_name": "submit_answer", "arguments": {"answer": answer}}
                await socket.send_json({"type": "step", "data": call})
                rewards.append((await socket.receive_json(timeout=60))["data"]["reward"])
        assert rewards == [1.0, 0.0, 0.0]


async def test_it_names_what_is_wrong(servers, tmp_path):
    tool_server = await servers.start([Ledger()])
    server, rows = ("--tool_server", tool_server.url), ("--rows", str(row_file(tmp_path, QUESTION)))
    for arguments, words in (
        ((*server, *rows), "--reward_manager"),
        ((*server, "--rows", str(tmp_path / "none.jsonl")), "does not exist"),
        ((*server, "--host", "192.0.2.1"), "cannot be listened on"),
        (("--tool_server", "127.0.0.1:1"), "begin it with http"),
    ):
        finished = await run("serve", "nemo_gym", "--port", "0", *arguments)
        assert finished.returncode == 1, finished.stderr
        assert words in " ".join(finished.stderr.split())
    written = tmp_path / "nemo.jsonl"
    made = await run("nemo_gym_rows", *server, *rows, "--output", str(written))
    assert made.returncode == 0, made.stderr
    [row] = [json.loads(line) for line in written.read_text().splitlines()]
    assert [tool["name"] for tool in row["responses_create_params"]["tools"]] == ["ledger"]
    assert row["agent_ref"]["name"] == "verl_tool_simple_agent"


def test_it_imports_neither_torch_nor_verl():
    code = (
        "import sys, verl_tool.environments.served.serve_cli; "
        "print(sorted({'torch', 'transformers', 'verl', 'ray'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert printed.stdout.strip() == "[]"
