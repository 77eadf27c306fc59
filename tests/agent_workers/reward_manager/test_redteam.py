"""Wrong answers against all reward managers, and against one that can be gamed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("verl.protocol")

from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from verl_tool.agent_workers.reward_manager import redteam

GAMED = """
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade
class Mine(GradingRewardManager):
    async def grade(self, sample):
        right = sample.ground_truth in sample.answer
        return Grade(float(right), right)
"""


@pytest.mark.parametrize("name", ["gsm8k", "calculator", "search_r1_qa_em", "reasoning_gym"])
async def test_no_wrong_answer_pays(name: str) -> None:
    found = await redteam.findings_in(redteam.manager_of(name, {}), redteam.SAMPLES[name], Console(quiet=True))
    assert [(f.attack.name, f.attack.segments) for f in found] == []


def test_what_can_be_gamed_is_told(tmp_path: Path) -> None:
    app = Typer()
    app.command()(redteam.main)
    mine = tmp_path / "mine.py"
    mine.write_text(GAMED, "utf-8")
    result = CliRunner().invoke(app, [str(mine)])
    assert result.exit_code == 1
    assert "false positives" in result.output
    assert CliRunner().invoke(app, ["no_such_manager"]).exit_code == 2
    assert CliRunner().invoke(app, [str(tmp_path / "none.py")]).exit_code == 2
