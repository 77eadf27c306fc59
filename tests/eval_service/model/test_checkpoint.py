"""Which weights of a run are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_service.model.checkpoint import newest_checkpoint, newest_model
from verl_tool.errors import ConfigError


def weights(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def test_the_model_that_a_training_began_with_is_no_checkpoint(tmp_path: Path) -> None:
    began = weights(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"no checkpoint in {tmp_path}.*--model {began} is the model with which"):
        newest_model(tmp_path)
    saved = weights(tmp_path / "checkpoints/global_step_5/actor/huggingface")
    checkpoint = newest_checkpoint(tmp_path)
    assert (checkpoint.model, str(checkpoint)) == (saved, f"step 5 of {tmp_path.name}")


def test_the_last_step_counts_by_number(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        weights(tmp_path / f"checkpoints/global_step_{step}/actor/huggingface")
    assert "global_step_100" in str(newest_model(tmp_path))


def test_a_config_without_weights_is_no_model(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/global_step_2/actor/huggingface"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    weights(tmp_path / "checkpoints/global_step_1/actor/huggingface")
    checkpoint = newest_checkpoint(tmp_path)
    assert "global_step_1" in str(checkpoint.model)
    assert str(checkpoint) == f"step 1 of {tmp_path.name} (no weights in global_step_2)"


def test_a_run_without_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --model"):
        newest_model(tmp_path)


def test_what_megatron_s_bridge_exports_is_found(tmp_path: Path) -> None:
    """The layout of `MegatronCheckpointManager` in verl 0.9.0 and 0.9.1."""
    actor = tmp_path / "checkpoints/global_step_3/actor"
    weights(actor / "model/huggingface")
    for part in ("model", "optimizer", "extra"):
        (actor / part / "dist_ckpt").mkdir(parents=True)
    assert newest_model(tmp_path) == actor / "model/huggingface"


def test_megatron_s_shards_alone_are_refused_and_no_older_weights_taken(tmp_path: Path) -> None:
    weights(tmp_path / "model")
    weights(tmp_path / "checkpoints/global_step_1/actor/model/huggingface")
    (tmp_path / "checkpoints/global_step_2/actor/model/dist_ckpt").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"global_step_2/actor holds Megatron's shards.*hf_model"):
        newest_model(tmp_path)
