"""An adapter of `verl_tool.environments.served` in front of a real tool server, in the process of the test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from live_server import LiveServers

from verl_tool.client import ToolClient
from verl_tool.environments.served.episode import EpisodeLimits, ServedEpisodes
from verl_tool.environments.served.row_grader import RowGrade, RowGrader
from verl_tool.environments.served.task_rows import TaskRow, TaskRows
from verl_tool.http.listening_socket import listen_at
from verl_tool.servers.cluster.direct_server import DirectServer
from verl_tool.servers.tools.base import Tool

QUESTION = {
    "data_source": "numbers",
    "prompt": [{"role": "user", "content": "What is 6*7?"}],
    "reward_model": {"style": "rule", "ground_truth": "42"},
}


class ExactGrader(RowGrader):
    """Compares the last turn with the ground truth, in place of a reward manager, whose imports take ten seconds."""

    async def start(self, rows: TaskRows) -> None: ...

    async def grade(self, row: TaskRow, turns: Sequence[str]) -> RowGrade:
        if turns and turns[-1] == "break the grader":
            return RowGrade(failure="the grader broke")
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
