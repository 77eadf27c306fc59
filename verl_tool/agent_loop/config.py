"""The loop's options in a trainer's config, or in the ``config.yaml`` that a run leaves behind. Imports no trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tool.agent_loop.options import EpisodeOptions


def options_in(config: DictConfig) -> EpisodeOptions:
    """The options in `config.actor_rollout_ref.agent`. Raises ConfigError."""
    written = OmegaConf.to_container(config.actor_rollout_ref.agent, resolve=True)
    assert isinstance(written, dict)  # a DictConfig gives a dict
    return EpisodeOptions.load(_set_by_user({str(name): value for name, value in written.items()}))


def _set_by_user(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without those that only repeat a default: the config file lists every option."""
    fields = EpisodeOptions.model_fields
    aliases = {name: value for name, value in (values.get("tool_config") or {}).items() if value is not None}
    own = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name != "tool_config"
    }
    chosen = {name: value for name, value in own.items() if name not in fields or fields[name].default != value}
    return chosen | ({"tool_config": aliases} if aliases else {})
