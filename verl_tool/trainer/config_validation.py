"""Looks at what a config names (tools, reward manager, files, numbers, GPUs) before anything is started.

Each check yields sentences that name the setting, its value and the remedy. Nothing here starts Ray or imports vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import typer
from omegaconf import DictConfig
from pydantic import ValidationError
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.verl.model_config import is_hub_name, why_not_loaded
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.by_source import BySourceRewardManager
from verl_tool.checks.row_files import file_names
from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.servers.tools import Tool
from verl_tool.trainer.ppo.turns.turn_columns import missing_turn_rewards_message, takes_turn_rewards
from verl_tool.trainer.preflight.backends import missing_sglang
from verl_tool.trainer.preflight.checks import Preflight, run_preflight
from verl_tool.trainer.preflight.resources import check_isolation, describe_gpus, gpu_pools, joins_cluster, sum_gpus

log = logging.getLogger(__name__)

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""click's, or that of the copy of click which newer versions of typer have."""


def check_parts(config: DictConfig, options: EpisodeOptions, *, tool_data_is_there: bool = True) -> Preflight:
    """What may go wrong in a training with this config. Raises ConfigError that tells all that stands in its way.

    Not `tool_data_is_there`: tools and reward manager, which read what a recipe has yet to make, are not looked at.
    """
    preflight, problems = run_preflight(config, options), list(_of_gpus(config))
    if config.dry_run:  # perhaps on a login node
        preflight.warnings += [f"not checked: {problem}" for problem in problems]
        problems = []
    problems += [*missing_sglang(config), *preflight.problems]
    if tool_data_is_there:
        problems += [*_of_tools(config, preflight), *_of_reward_manager(config)]
    if problems:
        raise ConfigError("\n       ".join(problems))
    return preflight


def missing_files(config: DictConfig) -> Iterator[str]:
    """A sentence for each local file of rows, and the model's folder, that the config names and that does not exist.

    Names on other machines (``hdfs://…``) and on a model hub (``owner/model``) are not looked at.
    """
    data, model, recipe = config.data, str(config.actor_rollout_ref.model.path), config.recipe
    maker = "examples/data_preprocess/ makes such files"
    if recipe is not None and recipe.make_data:
        maker = f"the recipe makes the files in {recipe.data}"
    for setting in ("train_files", "val_files"):
        for name in file_names(data[setting]):
            if "://" not in name and not Path(name).expanduser().exists():
                yield f"data.{setting}: there is no file {name}; {maker}"
    if "://" not in model and not is_hub_name(model) and not Path(model).expanduser().exists():
        yield f"actor_rollout_ref.model.path: there is no folder {model}"


def missing_model(config: DictConfig) -> Iterator[str]:
    """A sentence for a model of a hub that cannot be had."""
    model = str(config.actor_rollout_ref.model.path)
    if (why := why_not_loaded(model)) is not None:
        yield (
            f"actor_rollout_ref.model.path: {model} {why}; download it where there is a network (hf download {model}), "
            "or set a folder"
        )


def check_files(config: DictConfig) -> None:
    """Raises ConfigError that names all `missing_files`, and a `missing_model`, which a cluster's nodes may have."""
    problems, model = list(missing_files(config)), list(missing_model(config))
    if joins_cluster(config):
        for problem in model:
            log.warning("%s", problem)
    else:
        problems += model
    if problems:
        raise ConfigError("\n       ".join(problems))


def _of_gpus(config: DictConfig) -> Iterator[str]:
    if config.trainer.device != "cuda":
        return
    if os.environ.get("RAY_ADDRESS", "local") not in ("", "local") or joins_cluster(config):
        return  # a cluster that runs already says itself what it has
    found, pools = torch.cuda.device_count(), gpu_pools(config)
    if found < sum_gpus(pools):
        yield (
            f"the training needs {describe_gpus(pools)}, and this machine has {found} GPUs that PyTorch can use; set "
            "nnodes and n_gpus_per_node (N_GPUS, and ROLLOUT_GPUS of ASYNC=separate, of a recipe) to what there is, or "
            "add platform=cpu (PROFILE=cpu) for a trial without one"
        )


def tools_of(config: DictConfig) -> list[Tool]:
    """The tools that a server of this training would make, those of MCP servers left out; none if it starts no server.

    As the server does at its start: it reads its command line and makes its tools. Raises what stands in its way.
    """
    if config.tool_server.start is None:
        return []
    from verl_tool.servers import ray_serve
    from verl_tool.servers.mcp.catalog import require_sdk
    from verl_tool.servers.mcp.config import McpConfig
    from verl_tool.servers.tool_config import ToolConfig
    from verl_tool.servers.tools import load_tools

    app = typer.Typer()
    app.command()(ray_serve.serve_tools)
    context = typer.main.get_command(app).make_context("tool_server.args", args_of(config))
    provided, servers = context.params["tool_config"], context.params["mcp"]
    if servers is not None:
        # Whether they can be reached is seen when the server starts; --mcp_check tells before.
        McpConfig.from_file(servers)
        require_sdk()
    if not config.tool_server.start and servers is not None:
        return []
    shared = {"isolation": level} if (level := context.params["isolation"]) is not None else None
    return load_tools(config.tool_server.start, ToolConfig.from_cli(provided) if provided else None, shared)


def args_of(config: DictConfig) -> list[str]:
    """The command line of a server that the training starts."""
    level = config.tool_server.get("isolation")  # a run from before it was there has none
    return [*map(str, config.tool_server.args), *([] if level is None else ["--isolation", str(level)])]


def _of_tools(config: DictConfig, preflight: Preflight) -> Iterator[str]:
    args = args_of(config)
    try:
        tools = tools_of(config)
        # A cluster's nodes may give another level than this one.
        if joins_cluster(config):
            preflight.warnings += check_isolation(tools)
        else:
            yield from check_isolation(tools)
        for tool in tools:
            asyncio.run(tool.check_needs())
    except _UsageError as error:
        yield f"tool_server.args={args}: {cast('Any', error).format_message()}"
    except typer.Exit:
        yield f"tool_server.args={args} ends the server; leave --help out"
    except (VerlToolError, ValidationError) as error:
        yield f"tool_server.start={config.tool_server.start}: {error}"
    except Exception as error:  # noqa: BLE001 - a tool's file is anybody's code, and may raise anything
        yield f"tool_server.start={config.tool_server.start}: {type(error).__name__}: {error}"


class _TokenizerRequiredError(Exception):
    """A reward manager wants to know something of the tokenizer, which is not loaded here."""


class _NoTokenizer:
    def __getattr__(self, name: str) -> Any:
        raise _TokenizerRequiredError(name)


def _of_reward_manager(config: DictConfig) -> Iterator[str]:
    """As verl's reward workers do at their start: the class is found, and one is made with its options."""
    requested = config.reward.reward_manager
    description = f"reward.reward_manager.name={requested.name}"
    try:
        kind = resolve_reward_manager_cls(config)
        made = kind(
            config=config,
            tokenizer=_NoTokenizer(),
            compute_score=get_custom_reward_fn(config),
            reward_router_address=None,
            reward_model_tokenizer=None,
        )
        yield from _of_turn_rewards(config, made)
    except _TokenizerRequiredError:
        return
    except VerlToolError as error:
        yield str(error)
    except ValueError as error:
        known = "" if requested.name in REWARD_MANAGER else f"; known: {', '.join(sorted(REWARD_MANAGER))}"
        yield f"{description}: {error}{known}"
    except Exception as error:  # noqa: BLE001 - a manager is anybody's code, and may raise anything
        yield f"{description}: {type(error).__name__}: {error}"


def _of_turn_rewards(config: DictConfig, manager: Any) -> Iterator[str]:
    """Whether the estimator and one of verl-tool's managers agree; any other is heard when it has graded."""
    estimator = str(config.algorithm.adv_estimator)
    if not isinstance(manager, (GradingRewardManager, BySourceRewardManager)) or not takes_turn_rewards(estimator):
        return
    if not manager.by_turns:
        yield missing_turn_rewards_message(estimator)
    elif manager.turn_weight:
        yield (
            f"algorithm.adv_estimator={estimator} with turn rewards of which the score holds the sum, times "
            f"{manager.turn_weight:g}, counts them twice; set the weight in reward.reward_kwargs (turn_weight, or "
            "turn_rewards.weight) to 0"
        )
