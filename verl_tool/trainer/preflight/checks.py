"""All checks of a config, in the order in which their answers help."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import DictConfig
from rich.table import Table

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.trainer.preflight.backends import check_combinations
from verl_tool.trainer.preflight.impossible_settings import check_impossible_settings
from verl_tool.trainer.preflight.memory_report import report_memory
from verl_tool.trainer.preflight.model_shapes import ModelShape, UnknownShapeError, shape_of
from verl_tool.trainer.preflight.packages import check_packages
from verl_tool.trainer.preflight.parallelism import (
    check_batches,
    check_engine,
    check_training,
)
from verl_tool.trainer.preflight.resources import (
    check_cpu_slots,
    check_disk,
    check_shared_memory,
    joins_cluster,
    warn_of_cores,
    warn_of_shared_memory,
)


@dataclass
class Preflight:
    """What the checks find."""

    problems: list[str] = field(default_factory=list)
    """What the training cannot start with."""
    warnings: list[str] = field(default_factory=list)
    """What may go wrong, and what could not be checked."""
    memory: Table | None = None
    """The estimate of GPU memory."""


def run_preflight(config: DictConfig, options: EpisodeOptions) -> Preflight:
    """Check what `complete` returned `options` of: sizes, batches, combinations, packages, CPUs, disk, memory."""
    found = Preflight()
    found.problems += [*check_combinations(config), *check_impossible_settings(config, options)]
    if found.problems:  # what follows reads the settings that these name
        return found
    packages = list(check_packages(config))
    (found.warnings if joins_cluster(config) else found.problems).extend(packages)
    shape = _shape(config, found)
    found.problems += check_engine(config, shape)
    found.problems += check_training(config, shape)
    found.problems += check_batches(config)
    found.problems += check_cpu_slots(config)
    found.problems += check_shared_memory(config)
    found.warnings += [*warn_of_cores(config), *warn_of_shared_memory(config)]
    disk = check_disk(config, shape)
    found.problems += disk[0]
    found.warnings += disk[1]
    if not found.problems:
        memory = report_memory(config)
        found.problems += memory.problems
        found.warnings += memory.warnings
        found.memory = memory.table
    return found


def _shape(config: DictConfig, found: Preflight) -> ModelShape | None:
    model = config.actor_rollout_ref.model
    try:
        return shape_of(str(model.get("hf_config_path") or model.path))
    except UnknownShapeError as error:
        if config.trainer.device == "cuda":
            found.warnings.append(f"not checked: parallel sizes and lengths against the model: {error}")
        return None
