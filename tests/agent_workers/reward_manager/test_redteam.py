"""Wrong answers against all reward managers, and against some that can be gamed."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("torch")
pytest.importorskip("verl.protocol")

from click.testing import Result
from typer import Typer
from typer.testing import CliRunner

from verl_tool.agent_workers.reward_manager.grading.manager_process import GradedCase
from verl_tool.agent_workers.reward_manager.grading.manager_worker import grade, manager_of
from verl_tool.agent_workers.reward_manager.redteam import redteam_cli

pytestmark = pytest.mark.slow

JUDGED = {"deepsearch"}
"""Managers that need more than a tool server: their own files attack them, and those that have no `SAMPLES`."""
MATHEMATICS = dict.fromkeys(("torl", "mt_torl", "pixel_reasoner", "simple_tir"), 119)
EVERY = dict.fromkeys(sorted(redteam_cli.SAMPLES.keys() - JUDGED), 9) | {"acecoder": 19, "mathcoder": 29} | MATHEMATICS
"""One attack in so many; the end-to-end test makes all."""
MINE = """
import asyncio, re, time
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade
class Mine(GradingRewardManager):
    async def grade(self, sample):
        right = {right}
        return Grade(float(bool(right)), bool(right))
"""


async def wrong_answers_that_pay(name: str, url: str, every: int) -> list[tuple[str, str]]:
    manager = manager_of(name, {"server_url": url} if name in ("acecoder", "mathcoder") else {})
    report = redteam_cli.RedTeamReport()
    for case in redteam_cli.cases_of(redteam_cli.SAMPLES[name], every):
        report.add(case, await grade(manager, case, redteam_cli.SECONDS))
    assert report.accepted
    return [(finding.attack.name, finding.ground_truth) for finding in report.found]


def attacked(*arguments: str) -> Result:
    app = Typer()
    app.command()(redteam_cli.main)
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, list(arguments))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.asyncio(loop_scope="module")
async def test_no_wrong_answer_pays(name: str, code_server_url: str) -> None:
    assert await wrong_answers_that_pay(name, code_server_url, EVERY[name]) == []


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.asyncio(loop_scope="module")
async def test_no_wrong_answer_at_all_pays(name: str, code_server_url: str) -> None:
    assert await wrong_answers_that_pay(name, code_server_url, 1) == []


EVALUATES = """
def evaluates(text, gold):
    try:
        return eval(text.strip().splitlines()[-1]) == float(gold)
    except Exception:
        return False
"""


@pytest.mark.parametrize(
    ("right", "found"),
    [
        ("sample.ground_truth in sample.text", {"listed by": "3, 72, Rhine", "right, then wrong": "#### 3"}),
        (
            "evaluates(sample.text, sample.ground_truth)",
            {"hexadecimal": "0x48", "_: bare": "7_2", "equals every": "type("},
        ),
        (
            "(sample.text.split('<answer>') + [''])[1] in ('', '</answer>', '72</answer>')",
            {"empty: answer tag": "<answer>"},
        ),
    ],
    ids=["anywhere in the text", "evaluates the last line", "takes nothing for an answer"],
)
def test_what_can_be_gamed_is_told_with_its_input(tmp_path: Path, right: str, found: dict[str, str]) -> None:
    mine, rows = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    mine.write_text(MINE.format(right=right) + EVALUATES, "utf-8")
    rows.write_text(json.dumps({"reward_model": {"ground_truth": "72"}}) + "\n", "utf-8")
    result = attacked(str(mine), "--data", str(rows), "--all")
    assert result.exit_code == 1
    for attack, text in found.items():
        assert any(attack in line and text in line for line in result.output.splitlines()), attack


@pytest.mark.parametrize(
    ("hangs", "attack"),
    [
        (r"re.fullmatch('(9|99)*x', sample.answer.replace('boxed', '').strip('\\\\{}'))", "huge"),
        ("await asyncio.sleep(60) if 'boxed' in sample.answer else False", "boxed"),
    ],
)
def test_a_grader_that_hangs_is_told_and_ended(tmp_path: Path, hangs: str, attack: str) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE.format(right=hangs), "utf-8")
    result = attacked(str(mine), "--seconds", "1")
    assert result.exit_code == 1
    told = " ".join(result.output.split())
    assert "hangs" in told
    assert attack in told
    assert "stopped: it hangs on 3 attacks" in told


LEAKY = "sample.answer.rpartition('Answer:')[1] and sample.ground_truth in sample.answer.rpartition('Answer:')[2]"
STRICT = "(re.findall(r'Total=\\s*(.*)', sample.answer) or [None])[-1] == sample.ground_truth"


def test_the_mark_of_a_manager_is_found_in_its_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE.format(right=LEAKY), "utf-8")
    result = attacked(str(mine))
    assert result.exit_code == 1
    assert "forms of the answer: 'Answer: {}'" in result.output
    assert "3, 72, Rhine" in result.output
    assert len(result.output.splitlines()) < 60
    assert len(attacked(str(mine), "--all").output.splitlines()) > len(result.output.splitlines())
    mine.write_text(MINE.format(right=STRICT), "utf-8")
    assert attacked(str(mine)).exit_code == 0


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        ({"prompt": [{"role": "user", "content": "How many? End with: Reply = NUMBER"}]}, "Reply = {}"),
        ({"extra_info": {"solution": "We add.\nReply = 72"}}, "Reply = {}"),
    ],
)
def test_the_form_is_found_in_the_rows(tmp_path: Path, columns: dict[str, object], form: str) -> None:
    mine, rows = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    mark = "chr(82) + 'eply ' + chr(61)"  # nowhere in the file as it is
    mine.write_text(MINE.format(right=f"sample.answer.partition({mark} + ' ')[2].strip() == sample.ground_truth"))
    rows.write_text(json.dumps({"reward_model": {"ground_truth": "72"}, **columns}) + "\n", "utf-8")
    result = attacked(str(mine), "--data", str(rows))
    assert result.exit_code == 0, result.output
    assert f"forms of the answer: '{form}'" in result.output


def test_a_gold_answer_that_is_not_accepted_fails_and_a_form_helps(tmp_path: Path) -> None:
    mine, rows = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    mine.write_text(MINE.format(right="sample.answer == chr(64) * 2 + sample.ground_truth"), "utf-8")
    rows.write_text(json.dumps({"reward_model": {"ground_truth": "72"}}) + "\n", "utf-8")
    result = attacked(str(mine), "--data", str(rows))
    assert result.exit_code == 1
    assert "the gold answer of 1 of 1 rows, such as '72', is accepted in no form" in result.output
    assert attacked(str(mine), "--data", str(rows), "--form", "@@{}").exit_code == 0
    assert attacked(str(mine), "--form", "@@").exit_code == 2


def test_partial_credit_is_told_and_no_false_positive() -> None:
    result = attacked("search_f1")
    assert result.exit_code == 0
    assert "partial credit: up to 0.8" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("wrong", "partial", "found"), [(0.9, True, False), (0.9, False, True), (1.0, True, True), (0.0, False, False)]
)
def test_partial_credit_is_less_than_a_right_answers(wrong: float, partial: bool, found: bool) -> None:
    plain, right, *_, attack = redteam_cli.cases_of([{"ground_truth": "72"}], 1000)
    report = redteam_cli.RedTeamReport()
    report.add(plain, GradedCase(0.0, partial=partial))
    report.add(right, GradedCase(1.0, 1.0, partial=partial))
    report.add(attack, GradedCase(wrong, partial=partial))
    assert bool(report.found) is found
    assert report.credit[0] == (wrong if partial and not found else 0.0)


def test_rows_of_ones_own_and_managers_of_verls_own(tmp_path: Path) -> None:
    """verl's manager takes all text for the model's, so that a tool's output pays."""
    row = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": None}
    lines, table, other = tmp_path / "rows.jsonl", tmp_path / "rows.parquet", tmp_path / "other.jsonl"
    lines.write_text(f"{json.dumps(row)}\n", "utf-8")
    pd.DataFrame([row]).to_parquet(table)
    other.write_text('{"question": "q"}\n', "utf-8")
    result = attacked("naive", "--data", str(lines))
    assert result.exit_code == 1
    assert "in an observation" in result.output
    assert attacked("gsm8k", "--data", str(table)).exit_code == 0
    assert attacked("gsm8k", "--data", str(other)).exit_code == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "does not exist"), ("x = 1", "it has none"), ("import no_such_module", "cannot be imported")],
)
def test_what_cannot_be_attacked_is_told(tmp_path: Path, text: str | None, words: str) -> None:
    mine = tmp_path / "mine.py"
    if text is not None:
        mine.write_text(f"{text}\nclass A:\n    pass\n", "utf-8")
    result = attacked(str(mine))
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize("arguments", [("no_such_manager",), ("gsm8k", "--option", "no_such_option=1")])
def test_unknown_managers_and_options_are_rejected(arguments: tuple[str, ...]) -> None:
    assert attacked(*arguments).exit_code == 2
