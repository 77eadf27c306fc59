"""A run's config, as the trainer writes it, read as settings of the service."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from run_folders import MODEL, run_folder

from verl_tool.errors import ConfigError

pytest.importorskip("verl")

from eval_service.model.run_config import read_run


def test_a_run_tells_everything_that_the_service_needs(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    run = read_run(folder)
    assert run.name == "my_run"
    assert run.model == str(folder / MODEL)
    assert run.options.action_stop_tokens == ("<call>",)
    assert (run.options.max_turns, run.options.max_prompt_length, run.options.max_response_length) == (2, 64, 96)
    assert run.sampling.temperature == 0.25
    assert run.max_model_len == 160
    assert run.dtype == "float32"
    assert (run.custom_chat_template, run.engine_kwargs) == (None, {})
    assert (run.tool_type, run.tool_server_args) == ("calculator", ("--num_replicas", "2"))


def test_the_limits_are_those_of_its_validation(tmp_path: Path) -> None:
    agent = "actor_rollout_ref.agent"
    options = read_run(run_folder(tmp_path, f"{agent}.val_max_turns=7", f"{agent}.val_max_response_length=50")).options
    assert (options.max_turns, options.max_response_length) == (7, 50)


def test_a_run_of_before_the_option_told_nothing(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "actor_rollout_ref.agent.enable_mtrl=true")
    assert read_run(folder).options.tool_schemas == "auto"
    config = OmegaConf.load(folder / "config/config.yaml")
    del (
        config.actor_rollout_ref.agent.tool_schemas,
        config.actor_rollout_ref.agent.tool_prompt,
        config.tool_server.tools,
    )
    OmegaConf.save(config, folder / "config/config.yaml")
    run = read_run(folder)
    assert (run.options.tool_schemas, run.tool_descriptions) == ("none", None)


def test_template_and_engine_are_those_of_the_run(tmp_path: Path) -> None:
    template = "actor_rollout_ref.model.custom_chat_template='{{ messages[0].content }}!'"
    engine = "+actor_rollout_ref.rollout.engine_kwargs.vllm={max_num_seqs:5,kv_cache_dtype:null}"
    run = read_run(run_folder(tmp_path, template, engine))
    assert run.custom_chat_template == "{{ messages[0].content }}!"
    assert run.engine_kwargs == {"max_num_seqs": 5}


def test_another_model_may_be_asked_for(tmp_path: Path) -> None:
    assert read_run(run_folder(tmp_path), "other").model == "other"


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config in"):
        read_run(tmp_path)


def test_a_config_that_is_no_runs_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path)
