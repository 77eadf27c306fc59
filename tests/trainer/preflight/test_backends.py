"""What is asked of training and rollout engines, on real configs: composed, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("torch")

from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass
from verl_loop import composed, reference_config

from verl_tool.errors import ConfigError
from verl_tool.platforms import attention
from verl_tool.trainer import main_ppo
from verl_tool.trainer.preflight.backends import check_backends, sglang_problem

pytestmark = pytest.mark.slow

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
SIZES = ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"]
SETTINGS = [
    *("algorithm.adv_estimator=grpo", "actor_rollout_ref.agent.enable_agent=false", *SIZES),
    *(f"{ROLLOUT}.name=vllm", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1"),
    *(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1", "trainer.n_gpus_per_node=8"),
]
MEGATRON = "model_engine=megatron"
R3 = f"{ACTOR}.megatron.router_replay.mode=R3"
ROUTES = f"{ROLLOUT}.enable_rollout_routing_replay=true"


def completed(*overrides: str) -> DictConfig:
    """The config of a training after all checks that one makes before it starts."""
    config = composed(*SETTINGS, *overrides)
    main_ppo.complete(config)
    return config


@pytest.fixture(autouse=True)
def _flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is composed here is for machines that have it."""
    monkeypatch.setattr(attention, "_why_not", lambda *_: None)


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        check_backends(composed(*SETTINGS, *overrides))
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "setting", "value"),
    [
        ([f"{ACTOR}.strategy=fsdp2"], "actor.engine.strategy", "fsdp2"),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{MODEL}.use_remove_padding=true"],
         "actor.engine.ulysses_sequence_parallel_size", 2),
        ([f"{ROLLOUT}.quantization=fp8"], "rollout.quantization", "fp8"),
        ([MEGATRON, f"{ACTOR}.megatron.context_parallel_size=2"], "actor.engine.context_parallel_size", 2),
        ([MEGATRON, R3, ROUTES], "actor.engine.router_replay.mode", "R3"),
        ([MEGATRON, R3, ROUTES, f"{ROLLOUT}.name=sglang"], "rollout.enable_rollout_routing_replay", True),
        ([MEGATRON, f"{ACTOR}.megatron.router_replay.mode=R2"], "actor.engine.router_replay.mode", "R2"),
        ([ROUTES, f"{ROLLOUT}.moe_load_balance_metrics_interval=5"], "rollout.enable_rollout_routing_replay", True),
    ],
)  # fmt: skip
def test_what_verl_s_classes_are_made_of(overrides: list[str], setting: str, value: object):
    config = completed(*overrides)
    parts = {"actor": config.actor_rollout_ref.actor, "rollout": config.actor_rollout_ref.rollout}
    part, *names = setting.split(".")
    found = omega_conf_to_dataclass(parts[part])
    for name in names:
        found = getattr(found, name)
    assert found == value


def test_the_second_rank_of_a_sequence_follows_for_the_reference_model():
    config = completed(f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{MODEL}.use_remove_padding=true")
    reference = reference_config(config)
    assert reference.engine.ulysses_sequence_parallel_size == 2


@pytest.mark.parametrize(
    ("setting", "value"),
    [("rollout_is", "token"), ("rollout_is", "sequence"), ("rollout_rs", "token_k1"), ("bypass_mode", "true")],
)
def test_rollout_correction_is_composed(setting: str, value: str):
    correction = completed(f"algorithm.rollout_correction.{setting}={value}").algorithm.rollout_correction
    assert str(correction[setting]).lower() == value


def test_sglang_loads_its_tokenizer():
    assert completed(f"{ROLLOUT}.name=sglang").actor_rollout_ref.rollout.skip_tokenizer_init is False
    assert completed().actor_rollout_ref.rollout.skip_tokenizer_init is True


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{ACTOR}.strategy=megatron"], "actor.strategy='megatron' with model_engine=dp; set model_engine=megatron"),
        ([MEGATRON, "critic.strategy=fsdp"], "critic.strategy='fsdp' with model_engine=megatron; set model_engine=dp"),
        (["model_engine=veomni"], "model_engine='veomni'; the engines that are checked"),
        ([MEGATRON, f"{MODEL}.lora_rank=8"], "--from_run would serve the base model alone"),
        ([MEGATRON, f"{MODEL}.lora.rank=8"], "--from_run would serve the base model alone"),
        ([MEGATRON, "deterministic=true"], "deterministic=true with model_engine=megatron"),
        ([MEGATRON, f"{ACTOR}.megatron.use_mbridge=false"], "use_mbridge=false with hf_model"),
        ([MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=3"], "context_parallel_size=1 does not divide the 8"),
        ([MEGATRON, f"{ACTOR}.megatron.expert_model_parallel_size=5"], "expert_model_parallel_size=5 times"),
        ([MEGATRON, f"+{ACTOR}.optim.lr_scheduler_type=cosine"], f"{ACTOR}.optim.lr_scheduler_type: FSDP's"),
        ([MEGATRON, f"+{ACTOR}.fsdp_config.param_offload=true"], f"{ACTOR}.fsdp_config: FSDP's"),
        ([f"{ROLLOUT}.name=trtllm"], "rollout.name='trtllm'; the loop can ask vllm and sglang"),
        ([f"{ROLLOUT}.name=sglang", f"{MODEL}.lora_rank=8"], "rollout.name=sglang with a LoRA adapter"),
        ([f"++{ACTOR}.router_replay.mode=R3"], "FSDP replays no routes"),
        ([MEGATRON, f"++{ACTOR}.router_replay.mode=R2"], "router_replay.mode=R2, which no training engine reads"),
        ([MEGATRON, R3], "set actor_rollout_ref.rollout.enable_rollout_routing_replay=true"),
        ([MEGATRON, R3, ROUTES, "actor_rollout_ref.replay=somewhere"], "stored trajectories hold no routes"),
        ([ROUTES], "nothing reads the routes"),
        ([MEGATRON, f"{ACTOR}.megatron.router_replay.mode=R2", ROUTES], "nothing reads the routes"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(overrides: list[str], words: str):
    assert words in problems(*overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [(MEGATRON, "images are checked with FSDP only"), (f"{ROLLOUT}.name=sglang", "images are checked with vLLM only")],
)
def test_engines_that_images_are_not_checked_with_are_refused(tmp_path: Path, override: str, words: str):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    config = composed(*SETTINGS, override, f"{MODEL}.path={tmp_path}", "data.train_files=[]", "data.val_files=[]")
    with pytest.raises(ConfigError, match=words):
        main_ppo.check_data(config)


def test_sglang_s_versions_are_named():
    pins = [
        'sglang[openai,srt]==0.5.8; extra == "sglang"',
        'torch==2.9.1; extra == "sglang"',
        'torch==2.0; extra == "x"',
    ]
    conflict = sglang_problem(None, "2.13.0+cu130", pins)
    assert conflict is not None
    assert "verl pins sglang==0.5.8 with torch==2.9.1, and verl-tool is written for torch 2.13" in conflict
    assert "install sglang==0.5.8" in (sglang_problem(None, "2.9.1+cu128", pins) or "")
    assert sglang_problem("0.5.8", "2.13.0", pins) is None
