"""Configs of recipes for GPUs, as Hydra composes them, and what the preflight says of changed ones."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tool.trainer import main_ppo  # noqa: F401 - Hydra finds verl's files by it
from verl_tool.trainer.composition import resolve_calculations
from verl_tool.trainer.preflight.resources import set_cpu_slots

RECIPES = Path(__file__).parents[2] / "examples" / "train"
GPU_FILES = sorted(str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/gpu*.yaml"))


@functools.cache
def _composed(file: str) -> DictConfig:
    folder, _, name = file.partition("/")
    with initialize_config_dir(str(RECIPES / folder), version_base=None):
        return compose(Path(name).stem, overrides=[f"recipe.folder={RECIPES / folder}", "trainer.device=cuda"])


def gpu_config(file: str = "acecoder/gpu.yaml", **settings: object) -> DictConfig:
    """A recipe's config with `settings`, whose names have ``__`` for a dot, as far completed as the preflight needs."""
    return changed_config(file, {name.replace("__", "."): value for name, value in settings.items()})


def changed_config(file: str, settings: dict[str, object]) -> DictConfig:
    """The same, with dotted names."""
    config = copy.deepcopy(_composed(file))
    with open_dict(config):
        for name, value in settings.items():
            OmegaConf.update(config, name, value)
        resolve_calculations(config)
        set_cpu_slots(config)
    return config
