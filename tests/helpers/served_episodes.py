"""An adapter of `verl_tool.environments.served` in front of a real tool server, in the process of the test."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from live_server import LiveServers
from peer_programs import peer_python

from verl_tool.client import ToolClient
from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.environments.served.episode import EpisodeLimits, ServedEpisodes
from verl_tool.environments.served.row_grader import RowGrade, RowGrader
from verl_tool.environments.served.task_rows import TaskRow, TaskRows
from verl_tool.http.listening_socket import listen_at
from verl_tool.servers.cluster.direct_server import DirectServer
from verl_tool.servers.tools.base import Tool
from verl_tool.verification import STYLE

PEER_SECONDS = 200
"""Their imports alone take half a minute on a busy machine."""
QUESTION = {
    "data_source": "numbers",
    "prompt": [{"role": "user", "content": "What is 6*7?"}],
    "reward_model": {"style": "rule", "ground_truth": "42"},
}


def workspace_row() -> dict[str, Any]:
    """A row that a verifier checks in the workspace: the file answer.txt must be 42."""
    script = (
        b"""[ "$(cat answer.txt)" = 42 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"""
    )
    verification = {"files": pack_files({"test.sh": PackedFile(script)}), "timeout_seconds": 20}
    return {
        "data_source": "files",
        "prompt": [{"role": "user", "content": "Write 42 into answer.txt. The question is in question.txt."}],
        "reward_model": {"style": STYLE, "ground_truth": json.dumps(verification)},
        "extra_info": {"tools_kwargs": {"workspace_files": pack_files({"question.txt": PackedFile(b"What is 6*7?")})}},
    }


async def run_peer(name: str, script: str, *arguments: str) -> str:
    """What a script prints that the package's Python runs. It reads the script from its standard input, since it may be
    in a file system of its own."""
    process = await asyncio.create_subprocess_exec(
        *(peer_python(name), "-", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(script.encode()), PEER_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-3000:]
    return output.decode()


class ExactGrader(RowGrader):
    """Compares the last turn with the ground truth, in place of a reward manager, whose imports take ten seconds."""

    async def start(self, rows: TaskRows) -> None: ...

    async def grade(self, row: TaskRow, turns: Sequence[str]) -> RowGrade:
        if turns and turns[-1] == "break the grader":
            return RowGrade(failure=f"it broke on the gold answer {row.ground_truth}")
        right = bool(turns) and str(row.ground_truth) in turns[-1]
        return RowGrade(float(right), numbers={"acc": float(right)})


def row_file(folder: Path, *rows: Mapping[str, Any]) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@asynccontextmanager
async def served(
    servers: LiveServers,
    make: Callable[..., Any],
    *tools: Tool,
    rows: Path | None = None,
    grader: RowGrader | None = None,
    port: int = 0,
    app_options: Mapping[str, Any] | None = None,
    **limits: Any,
) -> AsyncIterator[tuple[str, ServedEpisodes]]:
    """Yield the URL of an adapter, which `make` makes of its episodes, and the episodes."""
    live = await servers.start(tools)
    options = EpisodeLimits(**{"call_seconds": 30.0, **limits})
    async with ToolClient(live.url, timeout=options.call_seconds) as client:
        read = None if rows is None else TaskRows(rows)
        episodes = ServedEpisodes(client, options, read, grader or ExactGrader())
        await episodes.start()
        server = DirectServer(listen_at("127.0.0.1", port), max_message_bytes=1 << 20)
        await server.open(make(episodes, **(app_options or {})))
        try:
            yield server.url, episodes
        finally:
            await server.close(1.0)
            await episodes.close()
