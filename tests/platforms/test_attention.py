"""Attention without flash attention: what is chosen, and that packed sequences do not see each other."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("verl")
pytest.importorskip("torch")

import torch
from omegaconf import OmegaConf
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from verl.models.transformers import monkey_patch

from verl_tool.errors import ConfigError
from verl_tool.platforms.attention import PACKABLE, choose_attention

pytestmark = pytest.mark.slow

LENGTHS = (7, 1, 12, 3)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos")},
}
# Shorter than the longest sequence.
WINDOW = {"sliding_window": 4}
OWN_SIZES = {
    **dict.fromkeys(("gemma2", "gemma3_text", "mistral"), WINDOW),
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def text_model(kind, attention):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES | OWN_SIZES.get(kind, {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float()
    monkey_patch.apply_monkey_patch(model, use_remove_padding=True)
    return model


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", sorted(PACKABLE - {"qwen3_vl"}))
def test_packed_sequences_are_as_if_each_were_alone(kind, attention):
    model = text_model(kind, attention)
    sequences = [torch.randint(1, 64, (n,)) for n in LENGTHS]
    alone = torch.cat([model(input_ids=s[None], use_cache=False).logits.log_softmax(-1)[0] for s in sequences])
    packed = model(
        input_ids=torch.cat(sequences)[None],
        attention_mask=None,
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None],
        use_cache=False,
    ).logits.log_softmax(-1)[0]
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    expected, found = (gradients(model, each.square().sum()) for each in (alone, packed))
    torch.testing.assert_close(found, expected, atol=2e-5 * expected.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_sequences_of_a_model_with_images_do_too(attention):
    from tiny_vision import vision_model

    model = vision_model("qwen3_vl")[0].float()
    model.set_attn_implementation(attention)
    forwards = {kind: kind.forward for kind in (type(model), type(model.model))}
    try:
        monkey_patch.apply_monkey_patch(model, use_remove_padding=True)
        sequences = [torch.randint(10, 60, (n,)) for n in LENGTHS]

        def log_probs(ids, positions):
            # Four rows, as verl gives them: of the text, and of time, height and width.
            named = {"input_ids": ids[None], "position_ids": positions.expand(4, 1, -1), "attention_mask": None}
            return model(**named, use_cache=False).logits.log_softmax(-1)[0]

        alone = torch.cat([log_probs(s, torch.arange(len(s))) for s in sequences])
        packed = log_probs(torch.cat(sequences), torch.cat([torch.arange(n) for n in LENGTHS]))
    finally:
        for kind, forward in forwards.items():
            kind.forward = forward
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def make_config(device="cuda", **settings):
    config = OmegaConf.create(
        {
            "trainer": {"device": device},
            "actor_rollout_ref": {
                "model": {"use_remove_padding": True, "override_config": {}},
                "actor": {"strategy": "fsdp", "ulysses_sequence_parallel_size": 1},
                "ref": {"strategy": "fsdp"},
            },
            "critic": {"strategy": "fsdp", "model": {"use_remove_padding": True, "override_config": {}}},
        }
    )
    for name, value in settings.items():
        OmegaConf.update(config, name, value, force_add=True)
    OmegaConf.set_struct(config, True)
    return config


def in_force(config):
    models = (config.actor_rollout_ref.model, config.critic.model)
    return [(model.override_config.get("attn_implementation"), model.use_remove_padding) for model in models]


@pytest.fixture
def no_flash_attention(monkeypatch):
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def flash_attention(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", sys)


@pytest.mark.usefixtures("no_flash_attention")
def test_without_flash_attention_it_is_pytorch_s_own():
    config = make_config()
    choose_attention(config, "qwen2", critic=True)
    assert in_force(config) == [("sdpa", True)] * 2


@pytest.mark.usefixtures("no_flash_attention")
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gpt_oss"])
def test_models_not_known_to_keep_packed_sequences_apart_are_padded(kind):
    config = make_config()
    choose_attention(config, None, critic=True)
    assert in_force(config) == [("sdpa", True)] * 2
    choose_attention(config, kind, critic=True)
    assert in_force(config) == [("sdpa", False)] * 2


@pytest.mark.usefixtures("flash_attention")
def test_with_flash_attention_nothing_is_changed():
    config = make_config()
    choose_attention(config, "qwen2_5_vl", critic=True)
    assert in_force(config) == [(None, True)] * 2


@pytest.mark.usefixtures("flash_attention")
def test_on_a_cpu_there_is_no_flash_attention():
    config = make_config("cpu")
    choose_attention(config, "qwen2", critic=True)
    assert in_force(config) == [("sdpa", True)] * 2


@pytest.mark.usefixtures("no_flash_attention")
def test_a_critic_that_is_not_trained_is_left_alone():
    wanted = "critic.model.override_config.attn_implementation"
    config = make_config(**{wanted: "flash_attention_2", "critic.ulysses_sequence_parallel_size": 2})
    choose_attention(config, "gpt_oss", critic=False)
    assert in_force(config) == [("sdpa", False), ("flash_attention_2", True)]


@pytest.mark.usefixtures("flash_attention")
def test_the_packages_of_the_nodes_that_train_decide():
    config = make_config()
    choose_attention(config, "qwen2", critic=True, find_problem=lambda module: f"on node a {module} is missing")
    assert in_force(config) == [("sdpa", True)] * 2


@pytest.mark.usefixtures("flash_attention")
def test_another_attention_pads_as_well():
    config = make_config(**{"actor_rollout_ref.model.override_config.attn_implementation": "eager"})
    choose_attention(config, "gpt_oss", critic=True)
    assert in_force(config) == [("eager", False), (None, True)]


@pytest.mark.usefixtures("no_flash_attention")
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("model", ["actor_rollout_ref.model", "critic.model"])
def test_missing_flash_attention_is_refused_if_requested(model, version):
    setting = f"{model}.override_config.attn_implementation"
    config = make_config(**{setting: f"flash_attention_{version}"})
    with pytest.raises(
        ConfigError, match=rf"{setting}=flash_attention_{version}, and flash_attn\w* cannot be imported"
    ):
        choose_attention(config, "qwen2", critic=True)


@pytest.mark.usefixtures("no_flash_attention")
def test_sequence_parallelism_without_flash_attention_is_refused():
    config = make_config(**{"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"actor\.ulysses_sequence_parallel_size=2 .*attn_implementation=sdpa"):
        choose_attention(config, "qwen2", critic=True)


@pytest.mark.usefixtures("no_flash_attention")
def test_other_engines_choose_by_themselves():
    groups = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    config = make_config(**{f"{group}.strategy": "megatron" for group in groups})
    choose_attention(config, "qwen2", critic=True)
    assert in_force(config) == [(None, True)] * 2
