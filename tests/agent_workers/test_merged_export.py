"""An adapted model, saved as verl saves it, and loaded by transformers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from verl_tool.agent_workers.merged_export import merge_adapter  # noqa: E402

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
ADAPTER = LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", use_rslora=True, init_lora_weights=False)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def adapted(request, tmp_path):
    """The adapted model and the folder where verl would have left it."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(**SIZES, **heads, tie_word_embeddings=request.param)
    model = get_peft_model(Qwen3ForCausalLM(config), ADAPTER).eval()
    Qwen3ForCausalLM(config).save_pretrained(tmp_path, state_dict=model.state_dict())
    return model, tmp_path


def test_the_merged_model_says_what_the_adapted_one_said(adapted):
    model, folder = adapted
    ids = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        merge_adapter(folder, ADAPTER)
        loaded, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_model_with_a_hole_is_refused(adapted):
    from safetensors.torch import load_file, save_file

    _, folder = adapted
    weights = load_file(folder / "model.safetensors")
    del weights["base_model.model.model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        merge_adapter(folder, ADAPTER)
