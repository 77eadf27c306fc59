"""Find the tokens, in addition to the tokenizer's end token, at which engines end a turn by themselves."""

from __future__ import annotations

from transformers import AutoConfig, GenerationConfig

from verl_tool.agent_loop.tokenizer import token_ids


def generation_end_tokens(model: str, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Return the ``eos_token_id`` of a model's generation config, or else of its config, as vLLM does.

    Returns an empty tuple if `model` has neither: the engine then uses the tokenizer's end token only.
    """
    try:
        config = GenerationConfig.from_pretrained(model)
    except (OSError, ValueError):
        try:
            model_config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        except (OSError, ValueError):
            return ()
        config = GenerationConfig.from_model_config(model_config)
    return token_ids(config.eos_token_id)
