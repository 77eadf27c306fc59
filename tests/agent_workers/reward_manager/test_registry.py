"""Reward managers are found by name, whatever is imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("verl")

pytestmark = pytest.mark.slow

LOOK_UP = """
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import resolve_reward_manager_cls

for name in ("calculator", "naive"):
    chosen = {"reward": {"reward_manager": {"source": "register", "name": name}}}
    print(resolve_reward_manager_cls(OmegaConf.create(chosen)).__name__)
"""


@pytest.mark.parametrize("first", ["", "import verl_tool.agent_workers.reward_manager.base"])
def test_by_name(first):
    found = subprocess.run([sys.executable, "-c", first + LOOK_UP], capture_output=True, text=True, timeout=110)
    assert found.stdout.split() == ["CalculatorRewardManager", "NaiveRewardManager"], found.stderr[-2000:]
