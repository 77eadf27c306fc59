"""The arithmetic of memory against published figures, and that it moves as it should.

Published, and compared here:

- ZeRO (arXiv 1910.02054, section 3.1): mixed-precision Adam takes 16 bytes per parameter, 120 GB of 7.5 billion, and
  1.9 GB of each of 64 GPUs that share it (figure 1).
- vLLM's own log of Llama-3.1-8B on a 24 GB card (github.com/vllm-project/vllm/issues/10517): weights 14.99 GiB, and
  3.81 GiB of cache in 1952 blocks of 16 tokens. Of Qwen2.5-VL-72B on four (issues/16570): 34.43 GiB of weights each.
- Trainings that verl publishes as running (github.com/volcengine/verl, examples/tuning): Qwen2.5-Math-1.5B in full
  without offloading and Qwen2.5-7B with LoRA on one H100, Qwen2.5-14B in full on four H800.
- LoRA (arXiv 2106.09685) trains r(n + m) parameters of an n by m matrix.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("verl")

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tool.trainer.preflight.memory import GB, EngineMemory, Step, TrainedModel
from verl_tool.trainer.preflight.memory_report import _too_full
from verl_tool.trainer.preflight.model_shapes import ModelShape, shape_of

GIB = 2**30
H100 = 81559 * 2**20
"""What nvidia-smi says of one with 80 GB."""
LLAMA_8B = ModelShape(
    "meta-llama/Llama-3.1-8B", 8_030_261_248, 218_112_000, 1_050_677_248, 525_336_576, (), layers=32, hidden=4096,
    heads=32, kv_heads=8, head_dim=128, active_intermediate=14336, intermediate=14336, experts=0, vocab=128256,
    max_positions=131072, latent_kv=0,
)  # fmt: skip
QWEN_7B, QWEN_15B = shape_of("Qwen/Qwen2.5-7B-Instruct"), shape_of("Qwen/Qwen2.5-Math-1.5B")


def state(model: TrainedModel) -> float:
    """Weights, gradients and optimizer, where nothing is accumulated."""
    return model.weights + model.optimizer + replace(model, accumulates=False).gradients


def test_training_state_is_zero_s_16_bytes_per_parameter():
    of_75b = replace(LLAMA_8B, parameters=7_500_000_000)
    assert state(TrainedModel(of_75b, 1)) / GB == pytest.approx(120)
    assert state(TrainedModel(of_75b, 64)) / GB == pytest.approx(1.9, abs=0.05)


def test_cache_and_weights_are_those_that_vllm_logs():
    engine = EngineMemory(LLAMA_8B)
    assert engine.weights / GIB == pytest.approx(14.9888, rel=0.01)
    assert engine.cache_per_token * 1952 * 16 / GIB == pytest.approx(3.81, abs=0.005)
    of_72b = replace(LLAMA_8B, parameters=73_400_000_000)  # Qwen2.5-VL-72B
    assert EngineMemory(of_72b, tensor_parallel=4).weights / GIB == pytest.approx(34.43, rel=0.02)


def test_trainings_that_are_published_as_running_are_not_refused():
    full = TrainedModel(QWEN_15B, 1, update_tokens=4 * 4024, forward_tokens=4 * 4024)
    step = Step(full, H100, EngineMemory(QWEN_15B, utilization=0.4, max_model_len=4024))
    assert not step.problems()
    assert max(phase.total for phase in step.phases()) < 0.9 * H100
    adapter = TrainedModel(QWEN_7B, 1, lora_rank=32, offload_weights=True, offload_optimizer=True)
    assert not Step(adapter, H100, EngineMemory(QWEN_7B, utilization=0.2, max_model_len=1536)).problems()
    shape = shape_of("Qwen/Qwen2.5-14B-Instruct")
    shared = TrainedModel(shape, 4, offload_weights=True, offload_optimizer=True)
    assert not Step(shared, H100, EngineMemory(shape, tensor_parallel=4, max_model_len=2048), gpus=4).problems()


@pytest.mark.parametrize(
    ("model", "engine", "problem"),
    [
        (
            TrainedModel(QWEN_7B, 1, offload_weights=True, offload_optimizer=True),
            EngineMemory(QWEN_7B),
            "122 GB of each GPU",
        ),
        (
            TrainedModel(QWEN_15B, 1),
            EngineMemory(QWEN_15B, utilization=0.95),
            "trainer's weights on the card another 6 GB",
        ),
        (TrainedModel(QWEN_7B, 8), EngineMemory(QWEN_7B, utilization=0.15), "engine's weights (15.2 GB)"),
    ],
)
def test_what_cannot_fit_is_a_problem(model, engine, problem):
    (told,) = Step(model, 80 * GB, engine).problems()
    assert problem in told


def test_a_cache_too_small_for_one_trajectory_is_warned_of():
    """It is no error: a model may attend to a window in some of its layers."""
    for length, warned in ((10_000, False), (100_000, True)):
        step = Step(TrainedModel(QWEN_7B, 8), 80 * GB, EngineMemory(QWEN_7B, utilization=0.25, max_model_len=length))
        assert not step.problems()
        assert any("no room for a trajectory" in warning for warning in _too_full(step)) == warned


def test_an_offload_policy_holds_no_state_on_the_card():
    model = TrainedModel(QWEN_7B, 1, fsdp2=True, offload_policy=True, update_tokens=5120)
    step = Step(model, 80 * GB, EngineMemory(QWEN_7B, max_model_len=5120))
    assert not step.problems()
    assert step.host_bytes() == 12 * QWEN_7B.parameters
    assert {phase.name: phase.state for phase in step.phases()}["actor update"] == 0


def test_accumulated_gradients_are_those_of_the_whole_model():
    one = TrainedModel(QWEN_7B, 8, accumulates=False)
    assert one.gradients == 4 * QWEN_7B.parameters / 8
    assert replace(one, accumulates=True).gradients == 2 * QWEN_7B.parameters
    assert replace(one, accumulates=True, fsdp2=True).gradients == 4 * QWEN_7B.parameters


def test_a_critic_and_a_reference_take_their_share():
    actor = TrainedModel(QWEN_15B, 4, update_tokens=4096, forward_tokens=4096)
    alone = Step(actor, 80 * GB, EngineMemory(QWEN_15B), gpus=4)
    both = replace(alone, critic=replace(actor, has_head=False), reference=actor)
    names = [phase.name for phase in both.phases()]
    assert names == ["rollout", "log-probs", "reference", "values", "critic update", "critic optimizer", "actor update",
                     "actor optimizer", "weight sync"]  # fmt: skip
    total = {phase.name: phase.total for phase in both.phases()}
    assert total["critic update"] < total["actor update"], "a critic has no logits"
    assert total["rollout"] - alone.phases()[0].total == pytest.approx(12 * QWEN_15B.parameters / 4)
    assert both.host_bytes() == 4 * QWEN_15B.parameters


def test_an_engine_that_does_not_sleep_stays_on_the_card():
    model = TrainedModel(QWEN_15B, 1, update_tokens=4096)
    asleep = Step(model, 80 * GB, EngineMemory(QWEN_15B, utilization=0.4))
    awake = replace(asleep, engine=EngineMemory(QWEN_15B, utilization=0.4, sleeps=False))
    for before, after in zip(asleep.phases()[1:], awake.phases()[1:], strict=True):
        assert after.total - before.total == pytest.approx(0.4 * 80 * GB, rel=0.2), before.name


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40_000), shards=st.integers(1, 64), rank=st.sampled_from([0, 8, 64]), entropy=st.booleans(),
    fused=st.booleans(), policy=st.booleans(),
)  # fmt: skip
def test_the_estimate_moves_as_it_should(tokens, shards, rank, entropy, fused, policy):
    model = TrainedModel(
        QWEN_7B, shards, lora_rank=rank, update_tokens=tokens, forward_tokens=tokens, entropy_in_update=entropy,
        fused_kernels=fused, fsdp2=policy, offload_policy=policy,
    )  # fmt: skip

    def peak(changed: TrainedModel) -> float:
        return max(phase.total for phase in Step(changed, 80 * GB, EngineMemory(QWEN_7B), gpus=shards).phases()[1:])

    assert peak(replace(model, shards=2 * shards)) <= peak(model)
    assert peak(replace(model, update_tokens=2 * tokens)) >= peak(model)
    assert peak(replace(model, checkpointing=False)) >= peak(model)
    assert peak(replace(model, fused_kernels=True)) <= peak(replace(model, fused_kernels=False)) + GB
    assert all(phase.total > 0 for phase in Step(model, 80 * GB, EngineMemory(QWEN_7B)).phases())


@pytest.mark.parametrize(("padded", "width"), [(False, 20_000), (True, 4_000)])
def test_without_flash_attention_a_mask_of_pairs_of_tokens_is_counted(padded, width):
    model = TrainedModel(QWEN_15B, 1, update_tokens=20_000, forward_tokens=10_000, padded=padded, row_tokens=4_000)
    masked = replace(model, masks=True)
    assert masked.activations() - model.activations() == 20_000 * width * (1 + 2)
    without = replace(masked, checkpointing=False)
    assert without.activations() - replace(without, masks=False).activations() == 20_000 * width * (1 + 2 * 28)
    phases = [
        {phase.name: phase for phase in Step(each, H100, EngineMemory(QWEN_15B)).phases()} for each in (masked, model)
    ]
    forward, plain = (each["log-probs"] for each in phases)
    assert forward.total - plain.total == 10_000 * min(width, 10_000) * 3
