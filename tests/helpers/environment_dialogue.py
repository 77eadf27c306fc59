"""A dialogue in an environment: the real loop, tool server and client, and a model that says given turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from live_server import LiveServers
from toy_model import ScriptedEngine, ToyTokenizer

from verl_tool.agent_loop.actions import LoopFormats
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.opened_prompt import PromptOpener
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.client import ToolClient
from verl_tool.formats import HERMES
from verl_tool.protocol import ENVIRONMENT_FIELD
from verl_tool.servers.tools.base import Tool
from verl_tool.verification import EnvironmentVerification


def write_call(name: str, /, **arguments: Any) -> str:
    return HERMES.write_call(name, arguments)


class Dialogues:
    """Plays dialogues on one server. Use it in an ``async with`` block."""

    def __init__(self, tools: Sequence[Tool], seconds: float = 60.0) -> None:
        """`seconds`: deadline of a step, retries included."""
        self._tools, self._seconds = tools, seconds
        self._number = 0

    async def __aenter__(self) -> Dialogues:
        self._servers = LiveServers()
        live = await self._servers.start(self._tools)
        self._client = await ToolClient(live.url, timeout=self._seconds).__aenter__()
        self.described = await self._client.tools()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        await self._servers.stop()

    async def play(
        self, turns: Sequence[str], arguments: dict[str, Any], data: dict[str, Any], **options: Any
    ) -> Trajectory:
        """Play `turns` in the environment that begins with `arguments` and judges by `data`."""
        self._number += 1
        tokenizer = ToyTokenizer()
        loaded = EpisodeOptions.load({"enable_mtrl": True, "mtrl_role": "tool", "max_turns": len(turns), **options})
        formats = LoopFormats(loaded.formats, self.described)
        opener = PromptOpener(PromptRenderer(tokenizer, loaded, self.described), formats.of)
        prompt_ids, open_prompt = opener.of([{"role": "system", "content": "Be brief."}], None, "row 0")
        episode = Episode(ScriptedEngine(tokenizer, list(turns)), self._client, tokenizer, loaded, formats=formats.all)
        trajectory = await episode.run(
            prompt_ids,
            trajectory_id=f"dialogue-{self._number}",
            extra={ENVIRONMENT_FIELD: arguments},
            verification=EnvironmentVerification(data=data),
            open_prompt=open_prompt,
        )
        await episode.aclose()
        return trajectory


def text_of(trajectory: Trajectory) -> str:
    """All that the model reads and writes."""
    return ToyTokenizer().decode([*trajectory.prompt_ids, *trajectory.response_ids])
