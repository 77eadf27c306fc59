"""Render the prompt of a trajectory that begins in an environment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_tool.agent_loop.observation_renderer import ObservationRenderer
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.row import text_messages
from verl_tool.errors import ConfigError
from verl_tool.formats import Format
from verl_tool.protocol import Opening


@dataclass(frozen=True)
class OpenedPrompt:
    """What `Episode.run` needs of a prompt that is known only after an environment has begun."""

    prompt_ids: Sequence[int]
    formats: Sequence[Format]
    renderer: ObservationRenderer | None
    task_prompt: Callable[[str], Sequence[int]] | None


OpenPrompt = Callable[[Opening], OpenedPrompt]


class PromptOpener:
    """Renders the prompts of rows with environments, for one model and one tool server."""

    def __init__(self, prompts: PromptRenderer, formats_of: Callable[[Sequence[str] | None], Sequence[Format]]) -> None:
        """`formats_of` returns the formats of a trajectory that may use only the listed tools of the server."""
        self._prompts, self._formats_of = prompts, formats_of

    def of(
        self, messages: Sequence[Mapping[str, Any]], listed: Sequence[str] | None, where: str
    ) -> tuple[list[int], OpenPrompt]:
        """Return the prompt to record if the environment cannot begin, and the function that renders the opened one.

        `messages` are the row's, `listed` the only tools of the server that it allows, and `where` names the row.
        """
        spoken = any(message.get("role") == "user" for message in messages)
        unopened = [*messages] if spoken else [*messages, {"role": "user", "content": "?"}]
        ids = self._prompts.with_tools(()).ids(unopened, (), where)
        return ids, functools.partial(self._open, messages, listed, where)

    def _open(
        self, messages: Sequence[Mapping[str, Any]], listed: Sequence[str] | None, where: str, opening: Opening
    ) -> OpenedPrompt:
        """Raises ConfigError for a prompt without a user message, or one that its tools make too long."""
        shown = [*messages, *text_messages(opening.messages, f"{where}, its environment")]
        if not any(message.get("role") == "user" for message in shown):
            raise ConfigError(f"{where}: neither the row nor its environment has a user message; write one in the row")
        names = [tool.name for tool in opening.tools]
        prompts = self._prompts.with_tools(tuple(opening.tools)) if names else self._prompts
        known = [tool.name for tool in prompts.tools] if listed is None else [*listed, *names]
        allowed = known if names else listed
        return OpenedPrompt(
            prompts.ids(shown, allowed, where),
            self._formats_of(listed),
            prompts.observations(allowed),
            functools.partial(prompts.task_ids, messages, allowed),
        )
