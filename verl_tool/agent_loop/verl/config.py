"""The loop's options in a trainer's config, or in the ``config.yaml`` that a run leaves behind. Imports no trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tool.agent_loop.options import TOOL_CONFIG_ALIASES, EpisodeOptions


def options_in(config: DictConfig) -> EpisodeOptions:
    """The options in `config.actor_rollout_ref.agent`. Raises ConfigError."""
    written = OmegaConf.to_container(config.actor_rollout_ref.agent, resolve=True)
    assert isinstance(written, dict)  # a DictConfig gives a dict
    written.setdefault("tool_schemas", "none")  # a run of before the option told nothing
    return EpisodeOptions.load(_set_by_user({str(name): value for name, value in written.items()}))


def context_tokens(rollout: DictConfig) -> int:
    """The tokens that the rollout engine's context holds, by `config.actor_rollout_ref.rollout`."""
    return int(rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length)


def _set_by_user(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without those that only repeat a default: the config file lists every option.

    An option that has another name stands there as null, so that one that was set shows, whatever its value.
    """
    fields = EpisodeOptions.model_fields
    aliases = {name: value for name, value in (values.get("tool_config") or {}).items() if value is not None}
    own = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name != "tool_config"
    }
    twice_named = set(TOOL_CONFIG_ALIASES.values())
    chosen = {
        name: value
        for name, value in own.items()
        if name not in fields or (value is not None if name in twice_named else fields[name].default != value)
    }
    return chosen | ({"tool_config": aliases} if aliases else {})
