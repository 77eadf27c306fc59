"""Two evaluations compared: paired differences, flipped problems, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from eval_service import compare as program
from eval_service.evaluation.comparison import compare, difference, read_evaluation
from eval_service.evaluation.record import ABOUT, Record, write_records
from verl_tool.errors import ConfigError

SETTINGS = {"data": "test", "reward": "torl", "samples": 1, "temperature": 0.0, "seed": 7, "fingerprint": "a"}


def evaluation(folder: Path, right: list[list[bool] | None], salt: str = "", **about: object) -> Path:
    """A folder with the answers to each problem; None: an answer that did not come."""
    folder.mkdir(parents=True)
    records = []
    for index, answers in enumerate(right):
        if answers is None:
            records.append(Record(index, 0, "d", problem=f"problem {index}{salt}", error="no"))
        for sample, correct in enumerate(answers or ()):
            told = {"content": f"answer {index}", "score": float(correct), "correct": correct}
            records.append(Record(index, sample, "d", problem=f"problem {index}{salt}", **told))
    write_records(folder / "records.jsonl", records)
    (folder / ABOUT).write_text(json.dumps({**SETTINGS, "fingerprint": str(folder), **about}))
    return folder


def of(*folders: Path):
    return compare(*map(read_evaluation, folders))


def test_differences_are_paired_and_flips_are_listed(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [[True]] * 10 + [[False]] * 10)
    b = evaluation(tmp_path / "b", [[False]] + [[True]] * 9 + [[True]] * 8 + [[False]] * 2)
    found = of(a, b)
    assert (found.problems, found.first_accuracy, found.second_accuracy) == (20, 0.5, 0.85)
    assert [flip.index for flip in found.lost] == [0]
    assert [flip.index for flip in found.solved] == list(range(10, 18))
    assert found.accuracy.value == pytest.approx(0.35)
    assert 0 < found.accuracy.low < 0.35 < found.accuracy.high < 0.7
    # Two-sided binomial: 2 (1 + 9) / 2^9.
    assert (found.accuracy.test, found.accuracy.p) == ("exact McNemar", pytest.approx(20 / 512))
    assert found.remarks == ()


def test_an_interval_is_that_of_the_pairs_and_not_of_two_samples(tmp_path: Path) -> None:
    """Both vary by half from problem to problem, and never from one another."""
    a, b = (evaluation(tmp_path / name, [[True], [False]] * 50) for name in "ab")
    found = of(a, b)
    assert (found.accuracy.low, found.accuracy.value, found.accuracy.high, found.accuracy.p) == (0, 0, 0, 1)


def test_several_answers_a_problem_are_compared_by_their_shares(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [[True, False, False, False]] * 30)
    b = evaluation(tmp_path / "b", [[True, True, True, False]] * 30)
    found = of(a, b)
    assert found.accuracy.value == pytest.approx(0.5)
    assert found.accuracy.test == "sign-flip permutation"
    assert found.accuracy.p < 0.001
    assert len(found.solved) == 30
    assert (found.solved[0].first, found.solved[0].second) == (0.25, 0.75)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(60):
        values = rng.choice([-1.0, 0.0, 1.0], size=150, p=[0.2, 0.4, 0.4])
        found = difference(values, binary=True, seed=seed)
        covered += found.low <= 0.2 <= found.high
    assert covered >= 51


def test_answers_without_a_score_are_left_out_and_counted(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [[True], None, [True]])
    b = evaluation(tmp_path / "b", [[True], [True], [False]])
    found = of(a, b)
    assert (found.problems, found.left_out) == (2, 1)


def test_other_problems_are_refused(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [[True]] * 3)
    with pytest.raises(ConfigError, match=r"different problems \(3 and 2\): 1 problems are in .*/a alone.*--limit"):
        of(a, evaluation(tmp_path / "b", [[True]] * 2))
    with pytest.raises(ConfigError, match="row 0, and 2 more of 3, have another question"):
        of(a, evaluation(tmp_path / "c", [[True]] * 3, salt="!"))
    with pytest.raises(ConfigError, match="is no evaluation"):
        of(a, tmp_path / "nowhere")


def test_what_else_differs_is_named(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [[True]])
    b = evaluation(tmp_path / "b", [[True]], temperature=0.7, seed=None)
    assert of(a, b).remarks == ("temperature differs: 0.0 and 0.7", "seed differs: 7 and the endpoint's default")
    same = evaluation(tmp_path / "c", [[True]], fingerprint=str(a))
    assert of(a, same).remarks == ("both are answers of the same weights with the same loop",)
    (b / ABOUT).unlink()
    assert of(a, b).remarks == (f"{b} has no {ABOUT}: how it was asked is not compared",)


def test_the_command_prints_tables_and_writes_json(tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", [[True], [False], [False]])
    b = evaluation(tmp_path / "b", [[True], [True], [False]])
    app = program.typer.Typer()
    app.command()(program.command)
    out = tmp_path / "compared.json"
    done = CliRunner().invoke(app, [str(a), str(b / "records.jsonl"), "--out", str(out)], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "33.3%" in done.output
    assert "only B solves: 1 problems" in done.output
    assert json.loads(out.read_text())["solved"][0]["index"] == 1
    assert CliRunner().invoke(app, [str(a), str(tmp_path)]).exit_code == 2


def test_intervals_and_p_values_are_those_of_scipy() -> None:
    """scipy is there with the training stack; the comparison runs without it."""
    stats = pytest.importorskip("scipy.stats")
    binary = np.array([1.0] * 14 + [-1.0] * 4 + [0.0] * 40)
    found = difference(binary, binary=True)
    assert found.p == pytest.approx(stats.binomtest(14, 18).pvalue)
    rng = np.random.default_rng(0)
    values = rng.normal(0.1, 0.5, 60)
    found = difference(values, binary=False)
    options = {"n_resamples": 10_000, "rng": np.random.default_rng(1)}
    interval = stats.bootstrap((values,), np.mean, method="percentile", **options).confidence_interval
    assert (found.low, found.high) == pytest.approx(tuple(interval), abs=0.01)
    flips = stats.permutation_test((values,), lambda x, axis: x.mean(axis), permutation_type="samples", **options)
    assert found.p == pytest.approx(flips.pvalue, abs=0.01)
