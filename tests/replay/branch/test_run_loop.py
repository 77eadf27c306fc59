"""A run's loop is read from its folder; a model that reads its tokens otherwise is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("transformers")

from branch_runs import branch_run
from run_folders import MODEL
from stored_runs import trajectory

from verl_tool.errors import ConfigError
from verl_tool.replay.branch.run_loop import load_run_loop

MADE = trajectory(0, "How many are left?", [("<shop>tea</shop>", "[tea]")], None)


def test_the_loop_and_sampling_are_those_of_the_training_or_of_the_validation(tmp_path: Path) -> None:
    run = branch_run(tmp_path, [MADE], "actor_rollout_ref.agent.val_max_turns=2")
    trained, validated = (load_run_loop(run, None, validation=each) for each in (False, True))
    assert (trained.options.max_turns, validated.options.max_turns) == (4, 2)
    assert (trained.sampling.temperature, validated.sampling.temperature) == (1.0, 0.25)
    assert load_run_loop(run, None, validation=True, temperature=0.5).sampling.temperature == 0.5
    assert trained.model == run / MODEL
    trained.check_tokens(MADE)


def test_another_tokenizer_is_refused_with_both_texts(tmp_path: Path) -> None:
    run = branch_run(tmp_path, [MADE])
    path = run / MODEL / "tokenizer.json"
    told = json.loads(path.read_text())
    letters = told["model"]["vocab"]
    letters["u"], letters["s"] = letters["s"], letters["u"]
    path.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"segment 1 to '<uhop>.* but the record has '<shop>"):
        load_run_loop(run, None, validation=False).check_tokens(MADE)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    run = branch_run(tmp_path, [MADE])
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_run_loop(run, tmp_path, validation=False)
