"""Texts of one's own, graded from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("verl.protocol")

from click.testing import Result
from typer import Typer
from typer.testing import CliRunner

from verl_tool.agent_workers.reward_manager.grading.grade_command import main

MINE = """
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade, GraderFault

class Mine(GradingRewardManager):
    details = ("length",)

    async def grade(self, sample):
        if sample.extra_info.get("offline"):
            raise GraderFault("no server")
        right = str(sample.ground_truth) in sample.text
        return Grade(float(right), right, {"length": len(sample.text)})
"""
TEXTS = [
    {"answer": "it is 72", "ground_truth": 72},
    {"answer": [["model", "let me see"], ["tool", "72"], ["model", "done"]], "ground_truth": "72"},
    {"answer": "72", "ground_truth": "72", "extra_info": {"offline": True}},
]


def graded(folder: Path, rows: list[dict[str, object]], *arguments: str) -> Result:
    (folder / "mine.py").write_text(MINE, "utf-8")
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    app = Typer()
    app.command()(main)
    texts = ["--texts", str(folder / "texts.jsonl")]
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(folder / "mine.py"), *texts, *arguments])


def test_each_text_gets_its_score_or_why_it_has_none(tmp_path: Path) -> None:
    option = ["--option", "shaping.tool_used.weight=0.5", "--output", str(tmp_path / "grades.jsonl")]
    result = graded(tmp_path, TEXTS, *option)
    assert result.exit_code == 1, result.output
    assert "3 texts: 2 with a score, 1 right, mean score 0.5" in result.output
    assert "grader: Mine: no server" in result.output
    told = [json.loads(line) for line in (tmp_path / "grades.jsonl").read_text("utf-8").splitlines()]
    assert [(each["row"], each["score"], each["acc"], each["length"]) for each in told] == [
        (0, 1.0, 1.0, 8.0),
        (1, 0.0, 0.0, 15.0),
        (2, None, None, None),
    ]
    assert [each["failure"] for each in told] == [None, None, "grader: Mine: no server"]
    assert told[0]["shaping/tool_used"] == 0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"ground_truth": "1"}, "row 0 has no 'answer'; it has: ground_truth"),
        ({"answer": 72, "ground_truth": "1"}, "row 0: answer is 72; it must be a text"),
        ({"answer": [], "ground_truth": "1"}, "row 0: answer is []"),
        ({"answer": [["user", "72"]], "ground_truth": "1"}, "with an author of model, tool, template"),
        ({"answer": [7], "ground_truth": "1"}, "it must be a text, or a list"),
    ],
)
def test_an_answer_that_is_none_is_named(tmp_path: Path, row: dict[str, object], words: str) -> None:
    result = graded(tmp_path, [row])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
