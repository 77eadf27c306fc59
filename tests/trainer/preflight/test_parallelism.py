"""GPUs, rows and tokens that do not come out even are refused, with value, limit and remedy."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("verl")

from hypothesis import given, settings
from hypothesis import strategies as st
from preflight_configs import changed_config, gpu_config

from verl_tool.trainer.preflight.model_shapes import shape_of
from verl_tool.trainer.preflight.parallelism import (
    check_batches,
    check_engine,
    check_training,
)

pytestmark = pytest.mark.slow

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SHAPE = shape_of("Qwen/Qwen2.5-7B-Instruct")  # 28 heads, 4 KV heads, MLP of 18944


def of_engine(overrides, shape=SHAPE):
    return "\n".join(check_engine(changed_config("acecoder/gpu.yaml", overrides), shape))


def of_training(overrides, shape=SHAPE):
    return "\n".join(check_training(changed_config("acecoder/gpu.yaml", overrides), shape))


def of_batches(overrides):
    return "\n".join(check_batches(changed_config("acecoder/gpu.yaml", overrides)))


def test_recipes_come_out_even():
    config = gpu_config()
    assert [*check_engine(config, SHAPE), *check_training(config, SHAPE), *check_batches(config)] == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"tensor_model_parallel_size": 3}, r"=3 \(TENSOR_PARALLEL\) does not divide the 8 GPUs .* such as 2$"),
        ({"tensor_model_parallel_size": 16}, "does not divide the 8 GPUs"),
        ({"data_parallel_size": 3}, "times data_parallel_size=3 does not divide the 8 GPUs"),
        ({"tensor_model_parallel_size": 8}, "does not divide the model's 28 attention heads"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size > 1"),
        ({"expert_parallel_size": 2}, "expert_parallel_size must be equal to tensor_model_parallel_size"),
        ({"expert_parallel_size": 2, "tensor_model_parallel_size": 2}, "has no experts"),
        ({"max_model_len": 3072}, "max_model_len=3072 leaves no token behind a prompt .* 5120$"),
        ({"max_model_len": 40000}, "max_model_len=40000 is above the model's max_position_embeddings=32768"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 4000}, "=4000 is below max_model_len=5120"),
        ({"max_num_batched_tokens": 512, "max_num_seqs": 600}, "=512 is below max_num_seqs=600"),
        ({"quantization": "fp8", "tensor_model_parallel_size": 8}, "fp8 takes blocks of 128 weights"),
    ],
)
def test_engine_sizes_that_cannot_work(overrides, problem):
    told = of_engine({f"{ROLLOUT}.{name}": value for name, value in overrides.items()})
    assert re.search(problem, told, re.MULTILINE), told


def test_a_replica_lies_evenly_on_nodes():
    nodes = {"trainer.n_gpus_per_node": 6, "trainer.nnodes": 2}
    assert "unevenly over nodes of 6 GPUs" in of_engine({**nodes, f"{ROLLOUT}.tensor_model_parallel_size": 4})
    assert not of_engine({"trainer.nnodes": 2, f"{ROLLOUT}.tensor_model_parallel_size": 4})


def test_key_value_heads_divide_or_are_divided():
    tensor = {"trainer.n_gpus_per_node": 6, f"{ROLLOUT}.tensor_model_parallel_size": 6}
    shape = shape_of("Qwen/Qwen2.5-1.5B")  # 12 heads, 2 KV heads
    assert not [line for line in of_engine(tensor, shape).split("\n") if "heads" in line]
    assert "2 key-value heads" in of_engine({**tensor, f"{ROLLOUT}.tensor_model_parallel_size": 3}, shape)


def test_without_the_model_only_gpus_are_compared():
    assert not of_engine({f"{ROLLOUT}.tensor_model_parallel_size": 8}, None)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 3}, r"size=3 \(ULYSSES\) does not divide the 8 GPUs"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 8}, "must divide the model's 28 attention heads"),
        (
            {f"{ACTOR}.ulysses_sequence_parallel_size": 2, "actor_rollout_ref.model.use_remove_padding": False},
            "needs use_remove_padding=true",
        ),
        ({f"{ACTOR}.fsdp_config.fsdp_size": 3}, "fsdp_size=3 does not divide the 8 GPUs"),
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 5119}, "len_per_gpu=5119 is below one row of 5120 .* at least 5120$"),
        ({f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 5000}, "log_prob_max_token_len_per_gpu=5000 is below one row"),
        (
            {"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 1, f"{ACTOR}.use_kl_loss": True},
            r"ref\.log_prob_max_token_len_per_gpu=1 is below one row",
        ),
        (
            {"critic.ppo_max_token_len_per_gpu": 4000, "algorithm.adv_estimator": "gae"},
            r"critic\.ppo_max_token_len_per_gpu=4000 is below one row",
        ),
        ({f"{ROLLOUT}.log_prob_use_dynamic_bsz": False}, "must be the same"),
    ],
)  # fmt: skip
def test_training_sizes_that_cannot_work(overrides, problem):
    told = of_training(overrides)
    assert re.search(problem, told, re.MULTILINE), told


def test_sequence_parallelism_shares_a_row():
    half = {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{ACTOR}.ppo_max_token_len_per_gpu": 2560}
    assert not of_training(half)
    assert "at least 2560" in of_training({**half, f"{ACTOR}.ppo_max_token_len_per_gpu": 2559})


def test_limits_of_models_that_do_not_run_are_not_compared():
    assert not of_training({"critic.ppo_max_token_len_per_gpu": 1})
    assert not of_training({"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 1})
    fixed = {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_max_token_len_per_gpu": 1}
    assert not of_training(fixed)


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({f"{ACTOR}.ppo_mini_batch_size": 4, f"{ROLLOUT}.n": 1}, "cannot be shared equally by 8 data-parallel ranks"),
        (
            {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3},
            "the 64 rows that each rank has of a mini-batch are no multiple of .*ppo_micro_batch_size_per_gpu=3",
        ),
        (
            {f"{ACTOR}.use_dynamic_bsz": False, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 3},
            "the 512 rows that each rank has of a step are no multiple of .*log_prob_micro_batch_size_per_gpu=3",
        ),
        (
            {"critic.ppo_mini_batch_size": 4, "algorithm.adv_estimator": "gae", f"{ROLLOUT}.n": 1},
            r"critic\.ppo_mini_batch_size=4",
        ),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_cut_up_evenly(newer, overrides, problem):
    told = of_batches({"trainer.use_v1": newer, **overrides})
    assert re.search(problem, told), told


def test_only_the_older_trainer_needs_whole_mini_batches():
    odd = {"data.train_batch_size": 100}
    assert "train_batch_size=100 is no multiple" in of_batches({"trainer.use_v1": False, **odd})
    assert not of_batches({"trainer.use_v1": True, **odd})


def test_sequence_parallelism_leaves_fewer_ranks():
    rows = {f"{ACTOR}.ppo_mini_batch_size": 4, f"{ROLLOUT}.n": 1}
    assert of_batches(rows)
    assert not of_batches({**rows, f"{ACTOR}.ulysses_sequence_parallel_size": 2})


@settings(max_examples=50, deadline=None)
@given(
    mini=st.integers(1, 12),
    n=st.integers(1, 6),
    gpus=st.integers(1, 8),
    micro=st.integers(1, 6),
    batch=st.integers(1, 24),
)
def test_of_the_newer_trainer_exactly_what_verl_asserts_is_refused(mini, n, gpus, micro, batch):
    sizes = {
        "data.train_batch_size": batch, f"{ACTOR}.ppo_mini_batch_size": mini, f"{ROLLOUT}.n": n,
        "trainer.n_gpus_per_node": gpus, f"{ACTOR}.use_dynamic_bsz": False,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
    }  # fmt: skip
    even = mini * n % gpus == 0 and mini * n // gpus % micro == 0
    assert bool(of_batches(sizes)) == (not even)
