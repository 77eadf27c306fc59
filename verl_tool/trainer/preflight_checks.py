"""The doctor's checks of a training's own model, tools, rows and reward, before its first step."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.verl.tool_descriptions import ask_for_tools, serves_mcp, tools_in
from verl_tool.agent_workers.reward_manager.grading.manager_process import GradedCase
from verl_tool.agent_workers.reward_manager.grading.manager_thread import graded_in_thread
from verl_tool.checks import examine, examine_agents_model, examine_rows
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.reward import constant_answers, constant_cases, decides_correctness, gold_cases, grading_failed
from verl_tool.checks.row_files import RowFile, columns_for_reward
from verl_tool.checks.setup import Row, Setup
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.gateway.settings import GatewaySettings
from verl_tool.protocol import ToolDescription
from verl_tool.trainer.config_validation import tools_of
from verl_tool.trainer.run_folder.saved_config import REFUSED_CONFIG, save_config
from verl_tool.trainer.tool_prompts import tokenizer_of

log = logging.getLogger(__name__)

ROWS = 100
"""So many of each file are looked at, the first ones."""
GRADING_SECONDS = 4.0
"""For all constant answers; those that are not graded by then are not judged."""
ASKING_SECONDS = 3.0
"""For a running server's tools, where no prompt needs them."""


def check_setup(
    config: DictConfig, options: EpisodeOptions, files: Sequence[RowFile], *, server_is_up: bool = True
) -> None:
    """Warn of what the doctor's checks find. Raises ConfigError that tells all that is wrong.

    `files`: those of the training's rows. Not `server_is_up`: as much as can be told without a tool server, and without
    a model that is not there yet.
    """
    if not config.doctor:
        return
    findings = findings_in(config, options, files, server_is_up=server_is_up)
    for finding in findings:
        if finding.severity is Severity.WARNING:
            log.warning("%s [%s]", finding, finding.check)
    errors = [f"{finding} [{finding.check}]" for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        run = f" --config {save_config(config, REFUSED_CONFIG)}" if server_is_up else ""
        more = f"python -m verl_tool.doctor{run} shows more; doctor=false leaves the checks out"
        raise ConfigError("\n       ".join([*errors, more]))


def findings_in(
    config: DictConfig, options: EpisodeOptions, files: Sequence[RowFile], *, server_is_up: bool
) -> list[Finding]:
    """What the checks find of a training with this config."""
    rows = _rows(files, config.data.prompt_key)
    findings = [*examine_rows(rows, columns_for_reward(config)), *_of_reward(config, rows, server_is_up)]
    if not server_is_up and not Path(config.actor_rollout_ref.model.path).expanduser().is_dir():
        return findings
    try:
        tokenizer = tokenizer_of(config)
    except (OSError, ValueError) as error:
        log.warning("the tokenizer cannot be loaded, so nothing is told of prompts and calls: %s", error)
        return findings
    if GatewaySettings.is_set(config):
        return findings + examine_agents_model(Setup(tokenizer, options, (), rows))
    tools = tuple(_tools(config, options, server_is_up))
    if not server_is_up:
        tools += tuple(_named_only(config, options, rows, tools))
    setup = Setup(tokenizer, options, tools, rows, drops_overlong=bool(config.data.filter_overlong_prompts))
    return findings + examine(setup)


def _rows(files: Sequence[RowFile], key: str) -> tuple[Row, ...]:
    return tuple(Row(f"row {i} of {file}", row, key) for file in files for i, row in enumerate(file.first_rows(ROWS)))


def _tools(config: DictConfig, options: EpisodeOptions, server_is_up: bool) -> Sequence[ToolDescription]:
    """Those that the prompts tell of, or that the server has; none if nobody tells them quickly."""
    if not options.enable_agent:
        return ()
    if description := tools_in(config):
        return description
    if config.tool_server.start is not None and not (server_is_up and serves_mcp(config)):
        return [tool.describe() for tool in tools_of(config)]
    if not server_is_up:
        return ()
    quick = options.model_copy(update={"tool_call_timeout": ASKING_SECONDS, "tool_call_max_retries": 0})
    try:
        return ask_for_tools(quick, os.environ.get("VERL_TOOL_API_KEY"))
    except ToolFault as fault:  # a server of another kind may not tell
        log.info("%s does not tell its tools: %s", options.tool_server_url, fault.message)
        return ()


def _named_only(
    config: DictConfig, options: EpisodeOptions, rows: Sequence[Row], known: Sequence[ToolDescription]
) -> Iterator[ToolDescription]:
    """Tools that config and rows name, and that nobody can tell of without the server: of MCP, or of another's."""
    reported_here = config.tool_server.start is not None and not serves_mcp(config)
    if reported_here or not options.enable_agent:
        return
    names = [] if isinstance(options.tool_schemas, str) else list(options.tool_schemas)
    for row in rows:
        with contextlib.suppress(ConfigError):  # `columns_are_there` tells of it
            names += row.listed or ()
    for name in dict.fromkeys(names):
        if all(tool.name != name for tool in known):
            yield ToolDescription(name=name, description="", parameters={}, usage="", example_actions=[])


def _of_reward(config: DictConfig, rows: Sequence[Row], server_is_up: bool) -> list[Finding]:
    """What constant answers earn. A manager may fail for want of the server, or of what an agent program leaves in the
    record, which tells nothing."""
    cases = constant_cases(rows)
    if not cases or config.reward.reward_model.enable:
        return []
    everything = [*cases, *gold_cases(rows)]

    def enough(graded: Sequence[GradedCase]) -> bool:
        return grading_failed(graded) or (len(graded) == len(cases) and decides_correctness(graded))

    graded = graded_in_thread(config, everything, GRADING_SECONDS, enough)
    if (not server_is_up or GatewaySettings.is_set(config)) and any(each.failure for each in graded):
        return []
    return list(constant_answers(everything, graded))
