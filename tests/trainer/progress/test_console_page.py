"""The tables of the page about training hold what the code has."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_tables import names, table

pytest.importorskip("verl")

from omegaconf import OmegaConf

from verl_tool.trainer import main_ppo
from verl_tool.trainer.ppo.graded_trajectories import CAUSES
from verl_tool.trainer.progress.step_table import COLUMNS

CONFIG = OmegaConf.load(Path(main_ppo.__file__).parent / "config/agent_ppo_trainer.yaml")
VERLS = {"actor_rollout_ref", "algorithm", "reward", "data", "trainer", "defaults", "hydra"}
OF_ASYNCHRONOUS = ("age", "oldest", "weight", "cut", "ess")


def test_console_columns_are_documented() -> None:
    told = [name for row in table("training.md", "Column") for name in names(row[0])]
    shown = [column.title for column in COLUMNS]
    assert [name for name in told if name in shown] == shown
    assert set(told) - set(shown) == set(OF_ASYNCHRONOUS)


def test_metric_limits_are_documented_with_their_defaults() -> None:
    told = {names(row[0])[0]: float(row[3]) for row in table("training.md", "`metric_limits.`")}
    assert told == {str(name): float(value) for name, value in CONFIG.metric_limits.items()}


def test_causes_of_faults_are_documented() -> None:
    told = {name for row in table("training.md", "Cause") for name in names(row[0])}
    assert told == set(CAUSES)


def test_own_config_groups_are_documented() -> None:
    told = {name.split(".")[0] for row in table("training.md", "Group") for name in names(row[0])}
    told |= {"dry_run", "doctor", "max_staleness", "recipe"}  # further down, or of another page
    assert set(map(str, CONFIG)) - VERLS <= told
    assert told - {"actor_rollout_ref", "tool_server", "platform"} <= set(map(str, CONFIG))


def test_files_of_a_run_are_documented() -> None:
    told = {name for row in table("training.md", "In `run_dir`") for name in names(row[0])}
    assert {"main_ppo.log", "config.yaml", "metrics.jsonl", "run.lock", "earlier/N/", "checkpoints/"} <= told
