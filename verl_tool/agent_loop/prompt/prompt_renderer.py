"""A prompt: the conversation as the chat template renders it, and what it tells of the tools.

Training, the eval endpoint and the notebook make their prompts here, so that a row has the same token ids in all three.
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
_QUESTION = ({"role": "user", "content": "?"},)
"""Rendered with tools and without to see what a template makes of them."""


@dataclass(frozen=True)
class _ToolPresentation:
    """How a prompt tells of some tools: by the template's own way, by a text, or not at all."""

    schemas: tuple[dict[str, Any], ...] | None = None
    usage: str = ""


class PromptRenderer:
    """Makes the prompts of one model and one tool server, as the options `tool_schemas` and `tool_prompt` say."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: EpisodeOptions,
        tools: Sequence[ToolDescription] = (),
        formats: Sequence[Format] | None = None,
    ) -> None:
        """`tools`: what the server has, as ``GET /tools`` tells. `formats`: those in which the loop finds calls; None:
        those that `options.formats` names.

        Raises ConfigError if `tool_schemas` names a tool that is not there, or the server has one by the name of the
        loop's own.
        """
        self._tokenizer, self._options = tokenizer, options
        self.tools = tuple(tools)
        self._formats = loop_formats(options.formats, tools) if formats is None else tuple(formats)
        self._preferred = HERMES if formats is None and options.formats is None else self._formats[0]
        self._tellings: dict[tuple[str, ...], _ToolPresentation] = {}
        self._renderers = ObservationRenderers(options, tokenizer, self._formats)
        self._of_schemas: dict[tuple[str, ...], ObservationRenderer] = {}
        self._own = (DELEGATE,) if options.subagents else ()
        if self._own and any(tool.name == DELEGATE.name for tool in tools):
            raise ConfigError("subagents=True adds the tool 'delegate', and the tool server has one of that name")
        if not isinstance(options.tool_schemas, str) and options.enable_agent:
            self.check_names(options.tool_schemas, "tool_schemas")

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Raises ConfigError if one of `names`, which stand at `where`, is no tool of the server."""
        known = [tool.name for tool in (*self.tools, *self._own)]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(f"{where}: the tool {unknown[0]!r} is unknown; known: {', '.join(known) or 'none'}")

    def described_tools(self, listed: Sequence[str] | None = None) -> tuple[ToolDescription, ...]:
        """The tools that a prompt tells of, in the server's order, whichever way they are told.

        `listed`: the only tools that the row or the request lets its trajectory use; None: it does not say.
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
        """The conversation up to the place where the model's turn begins, tools told.

        Raises ConfigError if the template leaves out what is told, and what the template raises.
        """
        presentation = self._present(self.described_tools(listed))
        if presentation.usage:
            return self._with_usage(messages, presentation.usage)
        return prompt_text(self._tokenizer, messages, presentation.schemas)

    def task_ids(self, messages: Messages, listed: Sequence[str] | None, task: str) -> list[int]:
        """Token ids of a sub-agent's prompt: `task` behind the system messages of `messages`. [prompt_length]"""
        system = [message for message in messages if message.get("role") in _SYSTEM_ROLES]
        return self._tokenizer.encode(self.text([*system, {"role": "user", "content": task}], listed))

    def ids(self, messages: Messages, listed: Sequence[str] | None, where: str, further_tokens: int = 0) -> list[int]:
        """Token ids of `text`. [prompt_length] `further_tokens`: those that its images have more than their
        placeholders.

        Raises ConfigError that names the row (`where`), its length and the limit, if it tells of tools and is longer
        than `max_prompt_length` or `max_start_length`: it would lose its head, and what it tells with it. And if it
        lists a tool that the server does not have.
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
                    f"Raise {name} (in training data.max_prompt_length), tell of fewer tools "
                    "(tool_schemas=[...]), or leave the row out"
                )
        return ids

    def observations(self, listed: Sequence[str] | None = None) -> ObservationRenderer:
        """How an observation goes on behind the prompt of `text`. Raises ConfigError if the template cannot serve."""
        tools = self.described_tools(listed)
        schemas = self._present(tools).schemas
        names = tuple(tool.name for tool in tools) if schemas else ()
        if names not in self._of_schemas:
            self._of_schemas[names] = self._renderers.of(schemas)
        return self._of_schemas[names]

    def _present(self, tools: tuple[ToolDescription, ...]) -> _ToolPresentation:
        if not tools:
            return _ToolPresentation()
        names = tuple(tool.name for tool in tools)
        if names not in self._tellings:
            self._tellings[names] = self._chosen(tools)
        return self._tellings[names]

    def _chosen(self, tools: Sequence[ToolDescription]) -> _ToolPresentation:
        way = self._options.tool_prompt
        schemas = tuple(schema_of(tool) for tool in tools)
        if way != "system":
            bare, described_tools = prompt_text(self._tokenizer, _QUESTION), self._rendered(schemas)
            takes_tools = described_tools != bare and all(tool.name in described_tools for tool in tools)
            if takes_tools and (way == "none" or self._template_stops_match(bare, described_tools)):
                return _ToolPresentation(schemas)
            if way == "none":
                return _ToolPresentation()
        return _ToolPresentation(usage=self._usage(tools).strip())

    def _rendered(self, schemas: Sequence[dict[str, Any]]) -> str:
        """What the template makes of `schemas`; nothing, if it fails on them."""
        try:
            return prompt_text(self._tokenizer, _QUESTION, schemas)
        except Exception as error:  # noqa: BLE001 - a template is a program, and raises what it likes
            log.warning("the chat template fails on the schemas of the tools: %s", error)
            return ""

    def _template_stops_match(self, bare: str, described_tools: str) -> bool:
        """Whether the calls that a template writes or teaches end at our stop strings, or are in one of our formats."""
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
        """How to call `tools`, in the format that ends at our stop strings, or in the first that was chosen. Raises
        ConfigError if sub-agents cannot be called in it."""
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
        """The conversation with `usage` behind its system message; where the template refuses such, before the user's
        first."""
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
                "the chat template leaves out the system message, and with it how to call the tools; tell it in the "
                "prompts of the data and set tool_schemas=none, or give another chat template"
            )
        return text


def schema_of(tool: ToolDescription) -> dict[str, Any]:
    """A tool as an entry of OpenAI's ``tools``, which chat templates take."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _before_the_user(messages: Messages, usage: str) -> list[dict[str, Any]]:
    changed = [dict(message) for message in messages]
    user = next((message for message in changed if message.get("role") == "user"), None)
    if user is not None:
        user["content"] = _joined(usage, user.get("content"))
    return changed


def _joined(before: Any, after: Any) -> Any:
    """Two contents with an empty line between. That of a message with images is a list of parts."""
    if not isinstance(before, list) and not isinstance(after, list):
        return f"{before or ''}\n\n{after or ''}".strip()
    parts = [*_parts(before), {"type": "text", "text": "\n\n"}, *_parts(after)]
    return parts


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
