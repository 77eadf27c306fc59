"""A run's config, as the trainer writes it, read as settings of the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_tool.errors import ConfigError

pytest.importorskip("verl")
hydra = pytest.importorskip("hydra")

from omegaconf import OmegaConf  # noqa: E402

import verl_tool.trainer  # noqa: E402
from eval_service.run_config import read_run  # noqa: E402

OVERRIDES = [
    "data.max_prompt_length=64",
    "data.max_response_length=96",
    "actor_rollout_ref.agent.action_stop_tokens=['<call>']",
    "actor_rollout_ref.agent.max_turns=2",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.25",
    "actor_rollout_ref.rollout.name=vllm",
    "tool_server.start=calculator",
    "tool_server.args=[--num_replicas,2]",
    "platform=cpu",
]


def run_folder(tmp_path: Path, *overrides: str) -> Path:
    """A folder with the trainer's real config in it, and a model."""
    folder = tmp_path / "my_run"
    with hydra.initialize_config_dir(str(Path(verl_tool.trainer.__file__).parent / "config"), version_base=None):
        config = hydra.compose("agent_ppo_trainer", [*OVERRIDES, *overrides])
    (folder / "config").mkdir(parents=True)
    OmegaConf.save(config, folder / "config/config.yaml")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    (folder / "model/model.safetensors").write_bytes(b"x")
    return folder


def test_a_run_tells_everything_that_the_service_needs(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    run = read_run(folder)
    assert run.name == "my_run"
    assert run.model == str(folder / "model")
    assert run.options.action_stop_tokens == ("<call>",)
    assert (run.options.max_turns, run.options.max_prompt_length, run.options.max_response_length) == (2, 64, 96)
    assert run.sampling.temperature == 0.25
    assert run.max_model_len == 160
    assert run.dtype == "float32"
    assert (run.tool_type, run.tool_server_args) == ("calculator", ("--num_replicas", "2"))


def test_another_model_may_be_asked_for(tmp_path: Path) -> None:
    assert read_run(run_folder(tmp_path), "other").model == "other"


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config in"):
        read_run(tmp_path)


def test_a_config_that_is_no_runs_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path)
