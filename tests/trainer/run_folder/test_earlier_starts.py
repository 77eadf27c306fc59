"""A start writes over nothing that an earlier one left, and mixes nothing with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_tool.errors import ConfigError
from verl_tool.trainer.run_folder.checkpoints import TRACKER
from verl_tool.trainer.run_folder.earlier_starts import archive_earlier_start, archive_records


def config(run: Path, **trainer: object) -> DictConfig:
    return OmegaConf.create(
        {
            "run_dir": str(run),
            "trajectories_dir": str(run / "trajectories"),
            "trainer": {"default_local_dir": str(run / "checkpoints"), "resume_mode": "auto", **trainer},
        }
    )


def write(path: Path, text: str = "{}\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def left_by_a_start(run: Path, steps: int = 3) -> None:
    for name in ("metrics.jsonl", "metrics.1.jsonl", "config.yaml", "model/config.json", "data/train.parquet"):
        write(run / name)
    write(run / "trajectories/validation_0.jsonl")
    for step in range(1, steps + 1):
        write(run / f"trajectories/step_{step}.jsonl", f"first start, step {step}\n")
        write(run / f"trajectories/step_{step}.tokens.npz", "tokens")
    write(run / "trajectories/images/abc.png", "picture")


def saved(run: Path, step: int) -> None:
    write(run / f"checkpoints/global_step_{step}/actor/model.pt")
    write(run / "checkpoints" / TRACKER, str(step))


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_saved_nothing_is_moved_aside_with_all_but_its_inputs(tmp_path: Path) -> None:
    left_by_a_start(tmp_path)
    before = names(tmp_path)
    assert archive_earlier_start(config(tmp_path)) == tmp_path / "earlier/1"
    assert names(tmp_path) - {f"earlier/1/{name}" for name in before} == {"model/config.json", "data/train.parquet"}
    assert archive_earlier_start(config(tmp_path)) is None
    left_by_a_start(tmp_path)
    assert archive_earlier_start(config(tmp_path)) == tmp_path / "earlier/2"
    assert (tmp_path / "earlier/1/trajectories/step_1.jsonl").exists()


def test_a_resumed_run_moves_the_steps_behind_its_checkpoint(tmp_path: Path) -> None:
    left_by_a_start(tmp_path)
    saved(tmp_path, 2)
    assert archive_earlier_start(config(tmp_path)) == tmp_path / "earlier/1"
    assert names(tmp_path / "earlier/1") == {
        *("trajectories/step_3.jsonl", "trajectories/step_3.tokens.npz", "trajectories/images/abc.png")
    }
    assert (tmp_path / "trajectories/step_2.jsonl").exists()
    assert (tmp_path / "metrics.jsonl").exists()


def test_to_begin_anew_moves_the_checkpoints_too(tmp_path: Path) -> None:
    left_by_a_start(tmp_path)
    saved(tmp_path, 2)
    archive_earlier_start(config(tmp_path, resume_mode="disable"))
    assert (tmp_path / "earlier/1/checkpoints/global_step_2/actor/model.pt").exists()
    assert not (tmp_path / "checkpoints").exists()


def test_a_fresh_folder_stays_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "model/config.json")
    write(tmp_path / "config.yaml")
    assert archive_earlier_start(config(tmp_path)) is None
    assert names(tmp_path) == {"model/config.json", "config.yaml"}


def test_records_outside_of_the_run_s_folder_stay_beside_theirs(tmp_path: Path) -> None:
    run, records = tmp_path / "run", tmp_path / "records"
    write(run / "metrics.jsonl")
    write(records / "step_1.jsonl")
    elsewhere = config(run)
    elsewhere.trajectories_dir = str(records)
    archive_earlier_start(elsewhere)
    assert names(tmp_path) == {"run/earlier/1/metrics.jsonl", "earlier/1/records/step_1.jsonl"}


def test_a_run_that_keeps_all_in_one_folder_moves_the_parts_of_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("metrics.jsonl", "model/config.json", "step_1.jsonl", "global_step_1/data.pt", TRACKER):
        write(run / name, "1")
    one = config(run, default_local_dir=str(run), resume_mode="disable")
    one.trajectories_dir = str(run)
    assert archive_earlier_start(one) == run / "earlier/1"
    moved = {"metrics.jsonl", "run/step_1.jsonl", "global_step_1/data.pt", TRACKER}
    assert names(tmp_path) == {"run/model/config.json", *(f"run/earlier/1/{name}" for name in moved)}


@pytest.mark.parametrize("records", ["out", "out/checkpoints"])
def test_folders_within_each_other_are_moved_once(tmp_path: Path, records: str) -> None:
    write(tmp_path / records / "step_1.jsonl")
    write(tmp_path / "out/checkpoints/global_step_1/data.pt")
    nested = config(tmp_path, default_local_dir=str(tmp_path / "out/checkpoints"), resume_mode="disable")
    nested.trajectories_dir = str(tmp_path / records)
    archive_earlier_start(nested)
    assert {Path(name).name for name in names(tmp_path) if "earlier/1/" in name} == {"step_1.jsonl", "data.pt"}
    assert all("earlier/1/" in name for name in names(tmp_path))


def test_a_file_that_is_still_there_is_moved_when_its_step_comes(tmp_path: Path) -> None:
    records = tmp_path / "trajectories"
    for text in ("first", "second"):
        archive_records(write(records / "validation_4.jsonl", text))
    kept = [(tmp_path / f"earlier/{n}/trajectories/validation_4.jsonl").read_text() for n in (1, 2)]
    assert kept == ["first", "second"]


@pytest.mark.parametrize("text", ["", "7", "x"])
def test_a_tracker_without_its_checkpoint_is_an_error(tmp_path: Path, text: str) -> None:
    saved(tmp_path, 2)
    write(tmp_path / "checkpoints" / TRACKER, text)
    with pytest.raises(ConfigError, match=rf"says '{text}', and there are global_step_2; write the number"):
        archive_earlier_start(config(tmp_path))
