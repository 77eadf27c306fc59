"""What the asynchronous modes refuse, and what follows from a mode where nothing else is said."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from verl_loop import composed

from verl_tool.errors import ConfigError
from verl_tool.trainer.preflight.sampling_mode import MODES, check_sampling_mode

MODE, ROLLOUT = "trainer.v1.trainer_mode", "actor_rollout_ref.rollout"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
SEPARATE = (f"{MODE}=separate_async", "trainer.use_v1=true", "trainer.device=cuda")


def test_the_older_trainer_and_the_newer_one_s_default_are_left_as_they_are():
    for version in ("true", "false"):
        config = composed(f"trainer.use_v1={version}")
        check_sampling_mode(config)
        rollout = config.actor_rollout_ref.rollout
        assert config.algorithm.rollout_correction.rollout_is is None
        assert (rollout.nnodes, rollout.checkpoint_engine.backend) == (0, "naive")


@pytest.mark.parametrize("mode", MODES[1:])
def test_an_asynchronous_mode_bounds_the_age_and_corrects_for_it(mode):
    config = composed(f"{MODE}={mode}", "trainer.use_v1=true", "trainer.device=cuda", "max_staleness=3")
    check_sampling_mode(config)
    assert config.algorithm.rollout_correction.rollout_is == "token"
    # verl counts the version that is trained too.
    assert config.trainer.v1.sampler.max_off_policy_threshold == 4
    assert config.trainer.v1.sampler.max_off_policy_strategy == "wait"


def test_separate_processes_get_their_weights_by_what_the_device_has():
    for device, backend in (("cuda", "nccl"), ("cpu", "gloo")):
        config = composed(*SEPARATE, f"trainer.device={device}", "data.train_batch_size=512")
        check_sampling_mode(config)
        assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == backend
        assert config.trainer.v1.separate_async.parameter_sync_step == 2


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        ((f"{MODE}=async",), "async is unknown; known: sync, colocate_async, separate_async"),
        ((f"{MODE}=colocate_async", "trainer.use_v1=false"), "samples first and trains then"),
        ((f"{MODE}=colocate_async", "actor_rollout_ref.replay=/run"), "stored trajectories are not sampled"),
        ((f"{MODE}=colocate_async", "max_staleness=0"), "max_staleness=0 with .* up to 1 updates old"),
        (
            (f"{MODE}=colocate_async", "max_staleness=2", "trainer.v1.colocate_async.num_warmup_batches=3"),
            "up to 3 updates old from the start",
        ),
        ((f"{MODE}=colocate_async", f"{ROLLOUT}.calculate_log_probs=false"), "set .*calculate_log_probs=true"),
        ((*SEPARATE, "data.train_batch_size=100"), "data.train_batch_size is 100; make it a multiple"),
        ((*SEPARATE, f"{ROLLOUT}.nnodes=0"), r"0 nodes with 8 of them; set .*\(ROLLOUT_NNODES\)"),
        ((*SEPARATE, f"{ROLLOUT}.tensor_model_parallel_size=3"), "no multiple of the 3 of an engine"),
        ((*SEPARATE, f"{ROLLOUT}.checkpoint_engine.backend=naive"), "backend=naive .* take nccl or nixl or"),
        (
            (*SEPARATE, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded"),
            "backend=delta_sha",
        ),
        ((*SEPARATE, "trainer.device=cpu", f"{ROLLOUT}.checkpoint_engine.backend=nccl"), "on a CPU; take gloo"),
        ((*SEPARATE, "actor_rollout_ref.model.lora_rank=8"), "set actor_rollout_ref.model.lora.merge=true"),
        ((*SEPARATE, "reward.reward_model.enable=true"), "reward_model.enable_resource_pool=true"),
    ],
)
def test_what_cannot_hold_is_refused(overrides, cause):
    with pytest.raises(ConfigError, match=cause):
        check_sampling_mode(composed("trainer.use_v1=true", *overrides))


def test_an_engine_for_sglang_alone_carries_weights_to_it():
    check_sampling_mode(
        composed(*SEPARATE, f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded")
    )


def test_an_adapter_that_is_merged_is_sent_with_the_weights():
    adapter = [f"actor_rollout_ref.model.{setting}" for setting in ("lora_rank=8", "lora.merge=true")]
    check_sampling_mode(composed(*SEPARATE, *adapter))
