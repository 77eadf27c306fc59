"""At which tokens engines end a turn by themselves, beside the tokenizer's own end token."""

from __future__ import annotations

from transformers import AutoConfig, GenerationConfig

from verl_tool.agent_loop.tokenizer import token_ids


def generation_end_tokens(model: str, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """The ``eos_token_id`` of the generation config in a model's folder, else of its config, as vLLM reads them.

    Empty if `model` has neither: then the engine knows the tokenizer's only.
    """
    try:
        config = GenerationConfig.from_pretrained(model)
    except (OSError, ValueError):
        try:
            of_model = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        except (OSError, ValueError):
            return ()
        config = GenerationConfig.from_model_config(of_model)
    return token_ids(config.eos_token_id)
