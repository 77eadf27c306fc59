"""Settings that leave nothing to learn from are refused before anything starts."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from verl_loop import composed

from verl_tool.agent_loop.verl.config import options_in
from verl_tool.trainer.preflight.impossible_settings import (
    IGNORED_VARIABLES,
    LAUNCH_VARIABLES,
    check_impossible_settings,
    find_misspelt_variables,
)

AGENT = "actor_rollout_ref.agent"


def problems(*overrides: str) -> list[str]:
    stops = (f"{AGENT}.action_stop_tokens=['<call>']", f"{AGENT}.tool_server_url=http://127.0.0.1:5000")
    config = composed(*stops, *overrides)
    return list(check_impossible_settings(config, options_in(config)))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.max_response_length=5"], "data.max_response_length=5 (MAX_RESPONSE_LENGTH) has no room for a call"),
        (["data.max_prompt_length=4"], "every prompt loses its beginning"),
        (["data.max_prompt_length=4", "data.filter_overlong_prompts=true"], "every row is left out"),
        (["algorithm.adv_estimator=grpo"], "adv_estimator=grpo compares the samples of one prompt"),
        (["algorithm.adv_estimator=grpo", "distillation.enabled=true"], "adv_estimator=grpo compares the samples"),
        (["algorithm.adv_estimator=rloo"], "adv_estimator=rloo compares the samples of one prompt"),
    ],
)
def test_what_leaves_no_sample_is_refused(overrides: list[str], words: str) -> None:
    [problem] = problems(*overrides)
    assert words in problem


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.max_response_length=5", f"{AGENT}.enable_agent=false"],
        ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"],
        ["algorithm.adv_estimator=grpo", "trainer.val_only=true"],
        ["algorithm.adv_estimator=reinforce_plus_plus"],
        [
            *("algorithm.adv_estimator=grpo", "distillation.enabled=true"),
            "distillation.distillation_loss.use_task_rewards=false",
        ],
    ],
)
def test_what_can_be_learned_from_is_not(overrides: list[str]) -> None:
    assert problems(*overrides) == []


READ = "STEPS SEED MODEL N LEARNING_RATE BATCH_SIZE RUN"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("STEP", "STEPS"), ("SEEDS", "SEED"), ("LEARNIGN_RATE", "LEARNING_RATE"), ("BATCHSIZE", "BATCH_SIZE")],
)
def test_a_misspelt_variable_is_refused_with_the_right_name(name: str, meant: str) -> None:
    environment = {LAUNCH_VARIABLES: READ, name: "3", "RUN": "/run", "PATH": "/bin", "N": "2", "_": "x", "HOME": "/"}
    [problem] = find_misspelt_variables(environment, composed())
    assert f"{name}=3 in the environment is read by nobody; did you mean {meant}?" in problem
    assert not list(find_misspelt_variables(environment | {IGNORED_VARIABLES: f"OTHER {name}"}, composed()))
    assert not list(find_misspelt_variables(environment | {meant: "5"}, composed()))  # this one is another program's
    assert not list(find_misspelt_variables({name: "3"}, composed()))  # not launched by the script


def test_names_that_a_recipe_s_config_reads_are_known() -> None:
    environment = {LAUNCH_VARIABLES: "VERL_TOOL_GPUS_HER", "VERL_TOOL_GPUS_HERE": "8"}
    assert not list(find_misspelt_variables(environment, composed()))
