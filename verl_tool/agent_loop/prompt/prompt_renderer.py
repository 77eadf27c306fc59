"""Render prompts: the conversation in the chat template, with a description of the tools.

Training, the eval endpoint and the notebook share this code, so that a row has the same token ids in all three.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_tool.agent_loop.observation_renderer import ObservationRenderer, ObservationRenderers
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.subagents import DELEGATE, DELEGATE_STOP, can_call_delegate
from verl_tool.agent_loop.rendering.tool_messages import TemplateCalls
from verl_tool.agent_loop.tokenizer import Tokenizer, prompt_text
from verl_tool.errors import ConfigError
from verl_tool.formats import HERMES, Format, loop_formats
from verl_tool.protocol import ToolDescription

log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
_SYSTEM_ROLES = ("system", "developer")
_MAX_RENDERERS = 256
"""How many sets of environments' tools keep what was computed for them."""
_QUESTION = ({"role": "user", "content": "?"},)
"""A conversation that is rendered with and without tools to see what a template does with them."""


@dataclass(frozen=True)
class _ToolPresentation:
    """How a prompt describes some tools: as `schemas` for the template, as the text `usage`, or not at all."""

    schemas: tuple[dict[str, Any], ...] | None = None
    usage: str = ""


class PromptRenderer:
    """Renders prompts for one model and one tool server, following the options `tool_schemas` and `tool_prompt`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: EpisodeOptions,
        tools: Sequence[ToolDescription] = (),
        formats: Sequence[Format] | None = None,
    ) -> None:
        """`tools` is the server's answer to ``GET /tools``. `formats` are those in which the loop finds calls; None
        selects `options.formats`.

        Raises ConfigError if `tool_schemas` names an unknown tool, or if a tool of the server has the name of one of
        the loop's.
        """
        self._tokenizer, self._options = tokenizer, options
        self.served_tools = tuple(tools)
        self.tools = tuple(tool for tool in tools if not tool.environment)
        self._requested_formats = formats
        self._with_tools: dict[str, PromptRenderer] = {}
        self._formats = loop_formats(options.formats, tools) if formats is None else tuple(formats)
        self._preferred = HERMES if formats is None and options.formats is None else self._formats[0]
        self._presentations: dict[tuple[str, ...], _ToolPresentation] = {}
        self._renderers = ObservationRenderers(options, tokenizer, self._formats)
        self._renderer_by_tools: dict[tuple[str, ...], ObservationRenderer] = {}
        self._own = (DELEGATE,) if options.subagents else ()
        if self._own and any(tool.name == DELEGATE.name for tool in tools):
            raise ConfigError("subagents=True adds the tool 'delegate', and the tool server has one of that name")
        if not isinstance(options.tool_schemas, str) and options.enable_agent:
            self.check_names(options.tool_schemas, "tool_schemas")

    def with_tools(self, tools: Sequence[ToolDescription]) -> PromptRenderer:
        """Return the renderer of prompts that describe `tools`, an environment's, in addition to the server's.

        Raises ConfigError if one has the name of another tool.
        """
        key = "\n".join(tool.model_dump_json() for tool in tools)
        if key not in self._with_tools:
            for name in (tool.name for tool in tools):
                if sum(tool.name == name for tool in (*self.tools, *self._own, *tools)) > 1:
                    raise ConfigError(f"the environment has a tool {name!r}, and there is another one of that name")
            if len(self._with_tools) >= _MAX_RENDERERS:  # rows may each have tools of their own
                self._with_tools.pop(next(iter(self._with_tools)))
            options, described = self._options, self._options.tool_schemas
            if not isinstance(described, str):
                options = options.model_copy(update={"tool_schemas": [*described, *(tool.name for tool in tools)]})
            every = (*self.tools, *tools)
            self._with_tools[key] = PromptRenderer(self._tokenizer, options, every, self._requested_formats)
        return self._with_tools[key]

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Raise ConfigError if one of `names`, which were set at `where`, is not a tool of the server."""
        known = [tool.name for tool in (*self.tools, *self._own)]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(f"{where}: the tool {unknown[0]!r} is unknown; known: {', '.join(known) or 'none'}")

    def described_tools(self, listed: Sequence[str] | None = None) -> tuple[ToolDescription, ...]:
        """Return the tools that a prompt describes, in the server's order.

        `listed` are the only tools that the row or the request allows, or None if it does not restrict them.
        """
        requested = self._options.tool_schemas
        if (
            not self._options.enable_agent
            or requested == "none"
            or (listed is None and not self._options.describes_tools)
        ):
            return ()
        names = {tool.name for tool in (*self.tools, *self._own)} if requested == "auto" else set(requested)
        own = tuple(tool for tool in self._own if tool.name in names and (listed is None or len(listed) > 0))
        if listed is not None:
            names.intersection_update(listed)
        return (*(tool for tool in self.tools if tool.name in names), *own)

    def text(self, messages: Messages, listed: Sequence[str] | None = None) -> str:
        """Render the conversation up to the start of the model's turn, with the tools described.

        Raises ConfigError if the template leaves out the description, and whatever the template raises.
        """
        presentation = self._present(self.described_tools(listed))
        if presentation.usage:
            return self._with_usage(messages, presentation.usage)
        return prompt_text(self._tokenizer, messages, presentation.schemas)

    def task_ids(self, messages: Messages, listed: Sequence[str] | None, task: str) -> list[int]:
        """Return the token ids of a sub-agent's prompt: the system messages, then `task`. [prompt_length]"""
        system = [message for message in messages if message.get("role") in _SYSTEM_ROLES]
        return self._tokenizer.encode(self.text([*system, {"role": "user", "content": task}], listed))

    def ids(self, messages: Messages, listed: Sequence[str] | None, where: str, further_tokens: int = 0) -> list[int]:
        """Return the token ids of `text`. [prompt_length] `further_tokens` is the number of tokens that the images need
        in addition to their placeholders.

        Raises ConfigError if `listed` has a tool that the server does not have. Raises ConfigError that names the row
        (`where`), its length and the limit, if the prompt describes tools and exceeds `max_prompt_length` or
        `max_start_length`: truncation on the left would remove the description.
        """
        if listed and self._options.tool_schemas != "none":
            self.check_names(listed, where)
        ids = self._tokenizer.encode(self.text(messages, listed))
        described_tools = self.described_tools(listed)
        for name in ("max_prompt_length", "max_start_length") if described_tools else ():
            limit = getattr(self._options, name)
            n = len(ids) + further_tokens
            if limit is not None and n > limit:
                bare = len(self._tokenizer.encode(prompt_text(self._tokenizer, messages)))
                raise ConfigError(
                    f"{where}: the prompt has {n} tokens, {len(ids) - bare} of them about the tools "
                    f"{', '.join(tool.name for tool in described_tools)}, and {name}={limit}: they would be cut off. "
                    f"Raise {name} (in training data.max_prompt_length), describe fewer tools "
                    "(tool_schemas=[...]), or leave the row out"
                )
        return ids

    def observations(self, listed: Sequence[str] | None = None) -> ObservationRenderer:
        """Return the renderer of observations after the prompt of `text`. Raises ConfigError if the template does not
        fit the options."""
        tools = self.described_tools(listed)
        schemas = self._present(tools).schemas
        names = tuple(tool.name for tool in tools) if schemas else ()
        if names not in self._renderer_by_tools:
            self._renderer_by_tools[names] = self._renderers.of(schemas)
        return self._renderer_by_tools[names]

    def _present(self, tools: tuple[ToolDescription, ...]) -> _ToolPresentation:
        if not tools:
            return _ToolPresentation()
        names = tuple(tool.name for tool in tools)
        if names not in self._presentations:
            self._presentations[names] = self._choose_presentation(tools)
        return self._presentations[names]

    def _choose_presentation(self, tools: Sequence[ToolDescription]) -> _ToolPresentation:
        way = self._options.tool_prompt
        schemas = tuple(schema_of(tool) for tool in tools)
        if way != "system":
            bare, described_tools = prompt_text(self._tokenizer, _QUESTION), self._render_schemas(schemas)
            takes_tools = described_tools != bare and all(tool.name in described_tools for tool in tools)
            if takes_tools and (way == "none" or self._template_stops_match(bare, described_tools)):
                return _ToolPresentation(schemas)
            if way == "none":
                return _ToolPresentation()
        return _ToolPresentation(usage=self._usage(tools).strip())

    def _render_schemas(self, schemas: Sequence[dict[str, Any]]) -> str:
        """Render a question with `schemas`. Returns an empty string if the template fails on them."""
        try:
            return prompt_text(self._tokenizer, _QUESTION, schemas)
        except Exception as error:  # noqa: BLE001 - a template is a program, and raises what it likes
            log.warning("the chat template fails on the schemas of the tools: %s", error)
            return ""

    def _template_stops_match(self, bare: str, described_tools: str) -> bool:
        """Return whether the calls that a template teaches end at our stop strings, or are in one of our formats."""
        stops = self._options.action_stop_tokens
        if stops:
            return any(stop in described_tools and stop not in bare for stop in stops)
        if TemplateCalls(self._tokenizer, self._formats).found:
            return True
        return any(
            not each.stop or any(stop in described_tools and stop not in bare for stop in each.stop)
            for each in self._formats
        )

    def _usage(self, tools: Sequence[ToolDescription]) -> str:
        """Describe how to call `tools`, in the format that ends at our stop strings, or else in the preferred format.
        Raises ConfigError if sub-agents cannot be called in it."""
        stops = set(self._options.action_stop_tokens)
        fitting = next((each for each in self._formats if stops.intersection(each.stop)), None)
        taught = fitting if stops else self._preferred
        if taught is not None and DELEGATE in tools and not can_call_delegate(taught):
            if DELEGATE_STOP not in stops:
                raise ConfigError(
                    f"subagents=True, and the format {taught.name} cannot name the tool 'delegate'; add "
                    f"{DELEGATE_STOP!r} to action_stop_tokens, or choose another format, such as formats=[hermes]"
                )
            others = [tool for tool in tools if tool is not DELEGATE]
            return "\n\n".join([*([taught.usage(others)] if others else []), DELEGATE.usage])
        return "\n\n".join(tool.usage for tool in tools) if taught is None else taught.usage(tools)

    def _with_usage(self, messages: Messages, usage: str) -> str:
        """Render the conversation with `usage` after its system message or, if the template rejects system messages,
        before the first user message."""
        first = dict(messages[0]) if messages else {}
        if first.get("role") in _SYSTEM_ROLES:
            first["content"] = _joined(first.get("content"), usage)
            text = prompt_text(self._tokenizer, [first, *messages[1:]])
        else:
            try:
                text = prompt_text(self._tokenizer, [{"role": "system", "content": usage}, *messages])
            except Exception:  # noqa: BLE001 - a template is a program, and raises what it likes
                text = prompt_text(self._tokenizer, _before_the_user(messages, usage))
        if usage not in text:
            raise ConfigError(
                "the chat template leaves out the system message, which says how to call the tools; describe them in "
                "the prompts of the data and set tool_schemas=none, or use another chat template"
            )
        return text


def schema_of(tool: ToolDescription) -> dict[str, Any]:
    """Return a tool as an entry of OpenAI's ``tools``, which chat templates accept."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _before_the_user(messages: Messages, usage: str) -> list[dict[str, Any]]:
    changed = [dict(message) for message in messages]
    user = next((message for message in changed if message.get("role") == "user"), None)
    if user is not None:
        user["content"] = _joined(usage, user.get("content"))
    return changed


def _joined(before: Any, after: Any) -> Any:
    """Join two contents with an empty line. The content of a message with images is a list of parts."""
    if not isinstance(before, list) and not isinstance(after, list):
        return f"{before or ''}\n\n{after or ''}".strip()
    parts = [*_parts(before), {"type": "text", "text": "\n\n"}, *_parts(after)]
    return parts


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
