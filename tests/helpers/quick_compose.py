"""Hydra's `compose`, reading the files of a config once per process, which takes most of the time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from verl_tool.trainer import composition  # noqa: F401  # the search path


def quick_compose(folder: Path | str, name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the config `name` of `folder` with `overrides`. Its files must not change meanwhile."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    values = [each for each in parsed if _is_value(each.key_or_group)]
    choices = tuple(str(each.input_line) for each in parsed if each not in values)
    config = copy.deepcopy(_composed(str(folder), name, choices))
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


def _is_value(key: str) -> bool:
    """Whether it sets a value: a choice among groups has no dot, and Hydra's own options select folders."""
    return ("." in key and not key.startswith("hydra.")) or key in ("run_dir", "max_staleness")


@functools.cache
def _composed(folder: str, name: str, choices: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(folder, version_base=None):
        return compose(name, overrides=list(choices))
