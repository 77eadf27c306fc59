"""A run's checkpoints are taken up by the same run only."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")

from omegaconf import DictConfig, OmegaConf
from quick_compose import quick_compose

from verl_tool.errors import ConfigError
from verl_tool.trainer import main_ppo
from verl_tool.trainer.resume_check import check_same_run, differences

pytestmark = pytest.mark.slow

AGENT = "actor_rollout_ref.agent"
STARTED = ("platform=cpu", "tool_server.start=python_code", "actor_rollout_ref.model.path=a", "data.train_files=[a]")


def composed(run: Path, *overrides: str) -> DictConfig:
    given = [main_ppo.quoted(override) for override in (f"run_dir={run}", *STARTED, *overrides)]
    return quick_compose(Path(main_ppo.__file__).parent / "config", "agent_ppo_trainer", given)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder in which a run saved a checkpoint."""
    folder: Path = tmp_path_factory.mktemp("run")
    (folder / "checkpoints/global_step_3/actor").mkdir(parents=True)
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    config = composed(folder)
    config.actor_rollout_ref.agent.tool_server_url = "http://127.0.0.1:30001"
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    return folder


@pytest.mark.parametrize(
    "override",
    [
        f"{AGENT}.enable_agent=false",
        f"{AGENT}.max_turns=7",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=b",
        "actor_rollout_ref.model.lora_rank=8",
        "data.train_files=[b]",
        "data.seed=5",
        "data.max_response_length=77",
        "actor_rollout_ref.actor.optim.lr=0.5",
        "actor_rollout_ref.rollout.n=17",
        "reward.reward_manager.name=torl",
        "reward.reward_kwargs.binary=false",
        "reward.reward_kwargs.shaping.tool_error.weight=-0.5",
        "actor_rollout_ref.actor.clip_ratio_c=5",
        "actor_rollout_ref.actor.shuffle=true",
        "critic.cliprange_value=0.1",
        "trainer.critic_warmup=7",
        "trainer.v1.trainer_mode=colocate_async",
        "tool_server.start=calculator",
        "trainer.use_v1=false",
    ],
)
def test_a_run_with_other_settings_is_refused_by_their_names(run: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="other settings") as refused:
        check_same_run(composed(run, override))
    assert f" {override.partition('=')[0]}=" in str(refused.value)
    assert "run_dir" in str(refused.value)


def test_bounds_on_age_count_where_trajectories_have_an_age() -> None:
    mode, bound = "trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy_threshold"
    for kind, counts in (("sync", False), ("colocate_async", True)):
        assert bool(differences({mode: kind, bound: 8}, {mode: kind, bound: 5})) == counts


def test_what_does_not_change_the_training_may_differ(run: Path) -> None:
    check_same_run(
        composed(
            run,
            "trainer.total_training_steps=99",
            "trainer.test_freq=3",
            "trainer.save_freq=7",
            "trainer.logger=[console]",
            "trainer.nnodes=2",
            "tool_server.port=31000",
            "tool_server.args=[--num_replicas,'2']",
            f"{AGENT}.tool_server_url=http://127.0.0.1:31000",
            f"{AGENT}.tool_call_timeout=9",
            "data.val_files=[c]",
            "reward.reward_kwargs.server_url=http://h:1",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
            "actor_rollout_ref.model.use_liger=true",
            "reward.reward_model.nnodes=3",
            "reward.reward_model.rollout.gpu_memory_utilization=0.3",
            "+reward.reward_kwargs.queue_seconds=3",
        )
    )


def test_one_place_may_be_told_in_several_ways(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round a name of the Hub is no place: `b` for `a` is refused, above."""
    monkeypatch.chdir(run)
    check_same_run(composed(run, "actor_rollout_ref.model.path=./a", f"data.train_files=[{run}/../{run.name}/a]"))


@pytest.mark.parametrize("mode", ["disable", "resume_path"])
def test_who_asks_for_a_start_anew_or_names_a_checkpoint_gets_it(run: Path, mode: str) -> None:
    check_same_run(composed(run, "data.seed=5", f"trainer.resume_mode={mode}"))


def test_a_folder_without_checkpoints_is_free(tmp_path: Path) -> None:
    OmegaConf.save(composed(tmp_path), tmp_path / "config.yaml", resolve=True)
    check_same_run(composed(tmp_path, "data.seed=5"))
