from __future__ import annotations

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")
pytest.importorskip("torchvision", reason="torchvision is not here: source scripts/env.sh train")

from tiny_vision import vision_model  # noqa: E402

from verl_tool.platforms.vision.placeholder_ban import ban_placeholders  # noqa: E402

IDS = torch.tensor([[7, 8, 9]])


def test_placeholders_have_no_probability_and_the_others_theirs():
    model, tokenizer, _ = vision_model("qwen3_vl")
    logits = model(input_ids=IDS).logits
    banned = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    logits = logits.detach().clone()
    logits[..., banned] = -torch.inf
    ban_placeholders(model)
    log_probs = model(input_ids=IDS).logits.log_softmax(-1)
    allowed = [n for n in range(logits.shape[-1]) if n not in banned]
    assert torch.allclose(log_probs[..., allowed], logits.log_softmax(-1)[..., allowed], atol=1e-6)
    assert (log_probs[..., banned].exp() == 0).all()
    entropy = -(log_probs.exp() * log_probs).sum()
    entropy.backward()
    assert torch.isfinite(entropy)
    assert all(torch.isfinite(w.grad).all() for w in model.parameters() if w.grad is not None)


def test_a_model_of_text_is_left_alone():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=1, num_key_value_heads=1))
    ban_placeholders(model)
    assert not model.lm_head._forward_hooks
