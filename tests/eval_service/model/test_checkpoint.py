"""Which weights of a run are taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eval_service.model import checkpoint as checkpoints
from eval_service.model.checkpoint import how_to_serve, last_saved_step, newest_checkpoint
from verl_tool.errors import ConfigError


def weights(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def test_the_model_that_a_training_began_with_is_no_checkpoint(tmp_path: Path) -> None:
    began = weights(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"no checkpoint in {tmp_path}.*--model {began} is the model with which"):
        newest_checkpoint(tmp_path)
    saved = weights(tmp_path / "checkpoints/global_step_5/actor/huggingface")
    checkpoint = newest_checkpoint(tmp_path)
    assert (checkpoint.model, str(checkpoint)) == (saved, f"step 5 of {tmp_path.name}")


def test_the_last_step_counts_by_number(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        weights(tmp_path / f"checkpoints/global_step_{step}/actor/huggingface")
    assert "global_step_100" in str(newest_checkpoint(tmp_path).model)


def test_a_config_without_weights_is_no_model(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/global_step_2/actor/huggingface"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    weights(tmp_path / "checkpoints/global_step_1/actor/huggingface")
    checkpoint = newest_checkpoint(tmp_path)
    assert "global_step_1" in str(checkpoint.model)
    assert str(checkpoint) == f"step 1 of {tmp_path.name} (no weights in global_step_2)"


def test_a_save_that_is_not_over_is_left_out_while_an_earlier_one_is_whole(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    weights(checkpoints / "global_step_4/actor/huggingface")
    (checkpoints / "global_step_6/actor").mkdir(parents=True)
    (checkpoints / "global_step_6/actor/model_world_size_2_rank_0.pt").write_bytes(b"x")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    assert newest_checkpoint(tmp_path).step == 4
    # verl has removed the actor before as soon as this one was there, and then the disk was full.
    shutil.rmtree(checkpoints / "global_step_4/actor")
    weights(checkpoints / "global_step_6/actor/huggingface")
    assert newest_checkpoint(tmp_path).step == 6


def test_some_files_of_several_are_no_weights(tmp_path: Path) -> None:
    weights(tmp_path / "checkpoints/global_step_1/actor/huggingface")
    later = tmp_path / "checkpoints/global_step_2/actor/huggingface"
    later.mkdir(parents=True)
    (later / "config.json").write_text("{}")
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (later / parts[0]).write_bytes(b"x")
    assert last_saved_step(tmp_path) == 1
    index = {"weight_map": {"a": parts[0], "b": parts[1]}}
    (later / "model.safetensors.index.json").write_text(json.dumps(index))
    assert last_saved_step(tmp_path) == 1
    (later / parts[1]).write_bytes(b"x")
    assert last_saved_step(tmp_path) == 2


def test_checkpoints_are_where_the_run_s_config_says(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (run / "config.yaml").write_text(f"run_dir: {run}\ntrainer: {{default_local_dir: {elsewhere}}}\n")
    assert f"{elsewhere}/global_step_*/actor" in how_to_serve(run)
    weights(elsewhere / "global_step_5/actor/huggingface")
    assert "(step 5 of run)" in how_to_serve(run)


def test_checkpoints_in_a_folder_that_was_moved_are_found(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run_dir: /old\ntrainer: {default_local_dir: /old/saved}\n")
    weights(tmp_path / "saved/global_step_5/actor/huggingface")
    assert last_saved_step(tmp_path) == 5


def test_a_run_without_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --model"):
        newest_checkpoint(tmp_path)


def test_what_megatron_s_bridge_exports_is_found(tmp_path: Path) -> None:
    """The layout of `MegatronCheckpointManager` in verl 0.9.0 and 0.9.1."""
    actor = tmp_path / "checkpoints/global_step_3/actor"
    weights(actor / "model/huggingface")
    for part in ("model", "optimizer", "extra"):
        (actor / part / "dist_ckpt").mkdir(parents=True)
    assert newest_checkpoint(tmp_path).model == actor / "model/huggingface"


def test_megatron_s_shards_alone_are_refused_and_no_older_weights_taken(tmp_path: Path) -> None:
    weights(tmp_path / "model")
    weights(tmp_path / "checkpoints/global_step_1/actor/model/huggingface")
    (tmp_path / "checkpoints/global_step_2/actor/model/dist_ckpt").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"global_step_2/actor holds Megatron's shards.*hf_model"):
        newest_checkpoint(tmp_path)


def test_a_merge_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(command: list[str], **_: object) -> None:
        weights(Path(command[command.index("--target_dir") + 1]))
        if fails:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.subprocess, "run", merge)
    fails = True
    with pytest.raises(KeyboardInterrupt):
        checkpoints._merge(tmp_path)
    assert not list(tmp_path.iterdir())
    fails = False
    (tmp_path / checkpoints.MERGED).mkdir()  # of a merge that was ended
    assert [file.name for file in sorted(checkpoints._merge(tmp_path).iterdir())] == [
        "config.json",
        "model.safetensors",
    ]
    assert [file.name for file in tmp_path.iterdir()] == [checkpoints.MERGED]
