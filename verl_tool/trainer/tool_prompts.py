"""What the tool server tells of its tools: asked when it is up, put into the config, which the run keeps, for the
prompts and for the tags in which the tools are called, and checked against the rows before any is trained on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.conversation import without_images
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer, schema_of
from verl_tool.agent_loop.row import listed_tools, uses_tools
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.verl.tool_descriptions import as_setting, ask_for_tools, tools_in
from verl_tool.checks.row_files import RowFile
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import ToolDescription

log = logging.getLogger(__name__)

LONGEST_ROWS = 1000
"""So many prompts of a file are made before the training, the longest ones; the loop looks at each."""
QUICK_SECONDS = 5.0
"""For a server's tools, where no prompt needs them."""
_LISTS = ("extra_info.tools_kwargs.tools", "extra_info.tool_selection")


@dataclass(frozen=True)
class _Row:
    where: str
    messages: list[dict[str, Any]]
    listed: tuple[str, ...] | None

    @property
    def length(self) -> int:
        """In characters."""
        return sum(len(str(message.get("content") or "")) for message in self.messages)


def attach_tool_descriptions(config: DictConfig, options: EpisodeOptions, files: Sequence[RowFile]) -> None:
    """Put the tools into the config, and look at the longest prompts that tell of them.

    `options`: with the address of the server. `files`: those of the training's rows. The server must be up. Where no
    prompt tells of tools and no row lists any, it is asked for the tags in which they are called unless `formats` is
    set; a run that goes on has those that it began with, and so has a step that is made again, for which no server is
    up. Raises ConfigError if a prompt needs the tools and the server does not answer, if a tool is named that it does
    not have, if a prompt is too long, or if the tools that prompts tell of are others than when this run began.
    """
    if not options.enable_agent or config.actor_rollout_ref.replay_step is not None:
        return
    if not options.describes_tools and not any(map(_lists_tools, files)):
        if options.formats is None and config.tool_server.tools is None:
            config.tool_server.tools = as_setting(_fetch_tools(options))
        return
    try:
        tools = ask_for_tools(options, os.environ.get("VERL_TOOL_API_KEY"))
    except ToolFault as fault:
        raise ConfigError(
            f"{options.tool_server_url} does not tell its tools, which the prompts shall name: {fault.message}. For a "
            "server without GET /tools tell of them in the rows, and set actor_rollout_ref.agent.tool_schemas=none"
        ) from fault
    _reject_others(tools_in(config), tools)
    config.tool_server.tools = as_setting(tools)
    prompts = PromptRenderer(tokenizer_of(config), options, tools)
    for file in files:
        _check_rows(file, config, prompts)


def _fetch_tools(options: EpisodeOptions) -> list[ToolDescription]:
    """The tools of the server; none if it does not tell them soon, as one of another kind may not."""
    limits = {"tool_call_timeout": min(QUICK_SECONDS, options.tool_call_timeout), "tool_call_max_retries": 0}
    try:
        return ask_for_tools(options.model_copy(update=limits), os.environ.get("VERL_TOOL_API_KEY"))
    except ToolFault as fault:
        log.warning(
            "%s does not tell its tools (%s): calls in tags of their names, such as <calculator>, are found in a turn "
            "that no stop string ends, in the mask of calls and in the metrics only if actor_rollout_ref.agent.formats "
            "names the tags",
            options.tool_server_url,
            fault.message,
        )
        return []


def _reject_others(before: Sequence[ToolDescription], now: Sequence[ToolDescription]) -> None:
    known = {tool.name: schema_of(tool) for tool in before}
    changed = [tool.name for tool in now if known.get(tool.name) != schema_of(tool)]
    exited = sorted(set(known) - {tool.name for tool in now})
    if before and (changed or exited):
        raise ConfigError(
            f"the tools of this run have changed since it began: {', '.join([*changed, *exited])}. Its model would be "
            "told other things from here on: serve the tools of before, or give another run_dir (in a recipe: RUN=...)"
        )


def _check_rows(file: RowFile, config: DictConfig, prompts: PromptRenderer) -> None:
    """Raises ConfigError for a row that lists an unknown tool, and for one of the longest that is too long."""
    rows = []
    for row in _rows(file, config.data.prompt_key):
        if row.listed is not None:
            prompts.check_names(row.listed, row.where)
        if prompts.described_tools(row.listed):
            rows.append(row)
    limit = config.data.max_prompt_length if config.data.filter_overlong_prompts else None
    for row in sorted(rows, key=lambda row: row.length, reverse=True)[:LONGEST_ROWS]:
        # verl leaves out what is too long without any tools.
        if limit is None or len(prompts.ids(row.messages, (), row.where)) <= limit:
            prompts.ids(row.messages, row.listed, row.where)


def _rows(file: RowFile, prompt_key: str) -> Iterator[_Row]:
    """Those that use tools."""
    for i, row in enumerate(file.rows((prompt_key, "use_tool", *_LISTS))):
        where = f"row {i} of {file}"
        listed = _listed(row, where)
        if row.get(prompt_key) is not None and uses_tools(row.get("use_tool"), where) and listed != ():
            yield _Row(where, without_images(row[prompt_key], where), listed)


def _lists_tools(file: RowFile) -> bool:
    return any(_listed(row, f"row {i} of {file}") is not None for i, row in enumerate(file.rows(_LISTS)))


def _listed(row: Mapping[str, Any], where: str) -> tuple[str, ...] | None:
    extra_info = row.get("extra_info")
    kwargs = extra_info.get("tools_kwargs") if isinstance(extra_info, Mapping) else None
    return listed_tools(kwargs, extra_info, where)


def tokenizer_of(config: DictConfig) -> HFTokenizer:
    """As the rollout's workers and the agent loop make it."""
    from verl.utils import hf_tokenizer
    from verl.utils.fs import copy_to_local

    from verl_tool.agent_loop.generators.end_tokens import generation_end_tokens

    model = config.actor_rollout_ref.model
    trust = bool(model.get("trust_remote_code", False))
    folder = copy_to_local(model.get("tokenizer_path") or model.path, use_shm=model.get("use_shm", False))
    tokenizer = hf_tokenizer(folder, trust_remote_code=trust)
    if model.get("custom_chat_template") is not None:
        tokenizer.chat_template = model.custom_chat_template
    more = generation_end_tokens(model.get("hf_config_path") or model.path, trust_remote_code=trust)
    return HFTokenizer(tokenizer, config.data.get("apply_chat_template_kwargs"), more)
