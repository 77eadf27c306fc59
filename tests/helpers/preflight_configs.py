"""Configs of recipes for GPUs, as Hydra composes them, and reports of the preflight on changed ones."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from quick_compose import quick_compose

from verl_tool.trainer import main_ppo  # noqa: F401 - Hydra finds verl's files by it
from verl_tool.trainer.composition import resolve_calculations
from verl_tool.trainer.preflight.resources import set_cpu_slots

RECIPES = Path(__file__).parents[2] / "examples" / "train"
GPU_FILES = sorted(str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/gpu*.yaml"))


def gpu_config(file: str = "acecoder/gpu.yaml", **settings: object) -> DictConfig:
    """Return a recipe's config with `settings`, whose names have ``__`` for a dot, as complete as the preflight
    requires."""
    return changed_config(file, {name.replace("__", "."): value for name, value in settings.items()})


def changed_config(file: str, settings: dict[str, object]) -> DictConfig:
    """Return the same for dotted names."""
    folder, _, name = file.partition("/")
    given = [f"recipe.folder={RECIPES / folder}", "trainer.device=cuda"]
    config = quick_compose(RECIPES / folder, Path(name).stem, given)
    with open_dict(config):
        for name, value in settings.items():
            OmegaConf.update(config, name, value)
        resolve_calculations(config)
        set_cpu_slots(config)
    return config
