"""Plays scripted turns in an environment as the training does: the prompt is rendered after the opening."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toy_model import ScriptedEngine, ToyTokenizer

from verl_tool.agent_loop.actions import LoopFormats
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.opened_prompt import PromptOpener
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.protocol import ENVIRONMENT_FIELD, ToolDescription
from verl_tool.verification import EnvironmentVerification

SYSTEM = [{"role": "system", "content": "Be brief."}]


async def play_turns(
    served: Any,
    described: Sequence[ToolDescription],
    turns: Sequence[str],
    arguments: dict[str, Any],
    data: Any = None,
    *,
    question: str | None = None,
    trajectory_id: str = "t",
    **options: Any,
) -> Trajectory:
    """Play `turns` in the environment that `arguments` name. `served` is what the loop calls, a `ToolClient` or
    `InProcessTools`, and `described` are the tools behind it."""
    tokenizer = ToyTokenizer()
    user = [] if question is None else [{"role": "user", "content": question}]
    loaded = EpisodeOptions.load({"enable_mtrl": True, **options})
    formats = LoopFormats(loaded.formats, described)
    opener = PromptOpener(PromptRenderer(tokenizer, loaded, described), formats.of)
    prompt_ids, open_prompt = opener.of([*SYSTEM, *user], None, "row 0")
    episode = Episode(ScriptedEngine(tokenizer, list(turns)), served, tokenizer, loaded, formats=formats.all)
    trajectory = await episode.run(
        prompt_ids,
        trajectory_id=trajectory_id,
        extra={ENVIRONMENT_FIELD: arguments},
        verification=EnvironmentVerification(data=data or {}),
        open_prompt=open_prompt,
    )
    await episode.aclose()
    return trajectory


def hermes(name: str, arguments: str = "{}") -> str:
    """A turn that calls a tool with arguments as JSON."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
