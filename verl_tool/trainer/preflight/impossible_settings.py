"""Settings with which nothing could be learned, and variables of a recipe that nobody reads."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.trainer.ppo.advantage import compares_within_groups

MIN_PROMPT_TOKENS = 8
"""A chat template's own tokens and one word: no prompt is shorter."""
MIN_RESPONSE_TOKENS = 16
"""Of a response with a tool: a call, its observation and an answer of one word need more."""
LAUNCH_VARIABLES = "VERL_TOOL_LAUNCH_VARIABLES"
"""Set by examples/train/launch.sh: the names of the variables that it reads."""
IGNORED_VARIABLES = "IGNORED_VARIABLES"
"""Variables of other programs, with blanks between, that only look like misspelt ones of a recipe."""
_SIMILAR = 0.85
_MIN_LENGTH = 4
_CONFIGS = Path(__file__).parents[1] / "config"


def check_impossible_settings(config: DictConfig, options: EpisodeOptions) -> Iterator[str]:
    """A sentence for each setting that leaves no sample to learn from."""
    yield from _check_lengths(config, options)
    yield from _check_groups(config)
    yield from find_misspelt_variables(os.environ, config)


def _check_lengths(config: DictConfig, options: EpisodeOptions) -> Iterator[str]:
    data = config.data
    if data.max_prompt_length < MIN_PROMPT_TOKENS:
        cut = "every row is left out" if data.filter_overlong_prompts else "every prompt loses its beginning"
        yield (
            f"data.max_prompt_length={data.max_prompt_length} (MAX_PROMPT_LENGTH) is shorter than any prompt of a "
            f"chat: {cut}; set it to the tokens of the longest prompt, {MIN_PROMPT_TOKENS} at least"
        )
    if options.enable_agent and data.max_response_length < MIN_RESPONSE_TOKENS:
        yield (
            f"data.max_response_length={data.max_response_length} (MAX_RESPONSE_LENGTH) has no room for a call, its "
            f"observation and an answer; set it to the tokens of all turns together, {MIN_RESPONSE_TOKENS} at least"
        )


def _check_groups(config: DictConfig) -> Iterator[str]:
    name, trainer = str(config.algorithm.adv_estimator), config.trainer
    if config.actor_rollout_ref.rollout.n != 1 or trainer.val_only or name not in ADV_ESTIMATOR_REGISTRY:
        return
    distillation = config.get("distillation")
    if distillation and distillation.enabled and not distillation.distillation_loss.use_task_rewards:
        return  # there is no advantage
    if compares_within_groups(name):
        yield (
            f"algorithm.adv_estimator={name} compares the samples of one prompt, and actor_rollout_ref.rollout.n=1 (N) "
            "makes one: set it to 2 or more, or take an estimator without groups (reinforce_plus_plus, gae)"
        )


def find_misspelt_variables(environment: Mapping[str, str], config: DictConfig) -> Iterator[str]:
    """A sentence for each variable whose name is nearly that of one of the recipe's, and that nobody reads."""
    read_by_script = environment.get(LAUNCH_VARIABLES, "").split()
    if not read_by_script:
        return
    known = {*read_by_script, *_read_by_configs(config), *environment.get(IGNORED_VARIABLES, "").split()}
    for name in sorted(set(environment) - known):
        if len(name) < _MIN_LENGTH or not re.fullmatch("[A-Z][A-Z0-9_]*", name):
            continue
        similar = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)
        if similar and similar[0] not in environment:  # else it is set, and this is another program's
            yield (
                f"{name}={environment[name]} in the environment is read by nobody; did you mean {similar[0]}? Unset "
                f'it, or say that it is another program\'s: {IGNORED_VARIABLES}="{name}"'
            )


def _read_by_configs(config: DictConfig) -> set[str]:
    folders = [_CONFIGS, *([Path(str(config.recipe.folder))] if config.recipe is not None else [])]
    texts = [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.yaml")]
    return {name for text in texts for name in re.findall(r"oc\.env:(\w+)", text)}
