"""Commands and table of assets/docs/one_gpu.md, and the estimates for these commands."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from omegaconf import open_dict
from preflight_configs import RECIPES, changed_config

from verl_tool.trainer.preflight.memory import GB
from verl_tool.trainer.preflight.memory_report import step_of

PAGE = RECIPES.parents[1] / "assets" / "docs" / "one_gpu.md"
VARIABLES = dict(re.findall(r"^ {4}([A-Z_]+) +([a-z][\w.]+)$", (RECIPES / "launch.sh").read_text(), re.MULTILINE))
COMMAND = re.compile(r"^\| `((?:[A-Z_0-9]+=\S+ )*)(?:bash )?examples/train/(\w+)/train\.sh` \|(.*)\|$", re.MULTILINE)


def settings_of(variables: str) -> dict[str, object]:
    """Return the options that ``NAME=value …`` sets."""
    pairs = (each.split("=", 1) for each in variables.split())
    return {VARIABLES[name]: yaml.safe_load(value) for name, value in pairs}


def rows_of_page() -> list[tuple[str, str, list[str]]]:
    """Return for each row with a command: its variables, its recipe and its other cells."""
    text = Path(PAGE).read_text(encoding="utf-8")
    return [
        (variables, recipe, [cell.strip() for cell in cells.split("|")])
        for variables, recipe, cells in COMMAND.findall(text)
    ]


def estimated_cells(variables: str, recipe: str) -> list[str]:
    """Return the expected cells of a row: the card, the total of each phase, host memory, in GB."""
    config = changed_config(f"{recipe}/gpu.yaml", settings_of(variables))
    with open_dict(config):  # as in verl 0.9.0, of which the page tells
        config.actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation = True
    step = step_of(config, config.gpu_memory_gb * GB)
    totals = {phase.name: phase.total / GB for phase in step.phases()}
    phases = ("rollout", "log-probs", "actor update", "actor optimizer", "weight sync")
    return [f"{config.gpu_memory_gb}", *(f"{totals[name]:.0f}" for name in phases), f"{step.host_bytes() / GB:.0f}"]
