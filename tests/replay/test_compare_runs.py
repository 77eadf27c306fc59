"""Two runs are the same but for times and ids, or the first differences are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("verl")

from stored_runs import replay, trajectory


def left(folder: Path, loss: float, answers: list[str], seconds: float = 1.0) -> Path:
    """What two steps of a training leave."""
    (folder / "trajectories").mkdir(parents=True)
    data = {"actor/pg_loss": loss, "critic/nan": float("nan"), "timing_s/step": seconds, "actor/perf/mfu": seconds}
    data |= {"val-agent/seconds/generate_mean": seconds, "agent/tool/submit/seconds_p50": seconds}
    lines = [json.dumps({"step": step, "data": data}) + "\n" for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    made = [trajectory(row, "What is 2+2?", [(answer, "")], 1.0) for row, answer in enumerate(answers)]
    told = [
        {**json.loads(each.to_json()), "trajectory_id": f"{folder}", "timings": {"total": seconds}} for each in made
    ]
    (folder / "trajectories" / "step_1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    return folder


def test_times_and_ids_do_not_count(tmp_path: Path) -> None:
    run, other = left(tmp_path / "a", 0.5, ["4", "5"]), left(tmp_path / "b", 0.5, ["4", "5"], seconds=2.0)
    result = replay(run, "--same_as", other)
    assert result.exit_code == 0, result.output
    assert "2 lines of metrics and 2 trajectories compared, all equal" in result.output


def test_the_first_difference_of_each_line_is_told(tmp_path: Path) -> None:
    run, other = left(tmp_path / "a", 0.5, ["4", "5"]), left(tmp_path / "b", 0.25, ["4", "6", "7"])
    result = replay(run, "--same_as", other, "--output", tmp_path / "found.jsonl")
    assert result.exit_code == 1
    assert "4 differ" in result.output
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert found[0] == {"where": "metrics.jsonl:1 data.actor/pg_loss", "was": 0.5, "now": 0.25}
    assert found[2]["where"] == "step_1.jsonl:2 segments[1].text"
    assert found[3]["where"] == "step_1.jsonl:3"
    assert replay(run, "--same_as", other, "--accept", tmp_path / "found.jsonl").exit_code == 0


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    run = left(tmp_path / "a", 0.5, ["4"])
    (tmp_path / "empty").mkdir()
    result = replay(run, "--same_as", tmp_path / "empty")
    assert result.exit_code == 2
    assert "has no metrics.jsonl" in result.output
    (run / "metrics.jsonl").write_text("{")
    assert "metrics.jsonl:1 is not JSON" in replay(run, "--same_as", run).output
    assert "--same_as" in replay(run, "--same_as", run, "--regrade").output
    (run / "metrics.jsonl").write_text("")
    assert "or it is empty" in replay(run, "--same_as", run).output


@pytest.mark.parametrize("line", ["[" * 100_000 + "]" * 100_000, b"\xff", '{"a": 1'], ids=["deep", "no UTF-8", "cut"])
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str | bytes) -> None:
    run, other = left(tmp_path / "a", 0.5, ["4"]), left(tmp_path / "b", 0.5, ["4"])
    with (other / "trajectories" / "step_1.jsonl").open("ab") as file:
        file.write(line if isinstance(line, bytes) else line.encode())
    result = replay(run, "--same_as", other)
    assert result.exit_code == 2
    assert "step_1.jsonl:2 is not JSON" in result.output


def test_files_that_cannot_be_read_or_written_are_no_difference(tmp_path: Path) -> None:
    run = left(tmp_path / "a", 0.5, ["4"])
    assert replay(run, "--same_as", run, "--output", tmp_path / "none" / "found.jsonl").exit_code == 2
    assert replay(run, "--same_as", run, "--accept", tmp_path / "none").exit_code == 2
    (run / "trajectories" / "step_2.jsonl").mkdir()
    assert replay(run, "--same_as", run).exit_code == 2


def test_differences_in_text_that_no_terminal_should_see_are_told(tmp_path: Path) -> None:
    run, other = left(tmp_path / "a", 0.5, ["4"]), left(tmp_path / "b", 0.5, ["4"])
    path = other / "trajectories" / "step_1.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "extra": {"a": "\ud800\u202e\x1b[31mä"}}) + "\n")
    path = run / "trajectories" / "step_1.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "extra": {"a": ""}}) + "\n")
    result = replay(run, "--same_as", other, "--output", tmp_path / "found.jsonl")
    assert result.exit_code == 1
    assert "\\ud800\\u202e\\u001b[31mä" in result.output
    assert json.loads((tmp_path / "found.jsonl").read_text())["now"] == "\ud800\u202e\x1b[31mä"
    assert replay(run, "--same_as", other, "--accept", tmp_path / "found.jsonl").exit_code == 0
