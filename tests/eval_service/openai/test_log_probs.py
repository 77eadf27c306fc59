"""The bytes of tokens that are parts of characters."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from real_tokenizers import shape

from eval_service.engines.base import TokenLogProb
from eval_service.openai.log_probs import chat_log_probs
from verl_tool.agent_loop.tokenizer import HFTokenizer


@pytest.mark.parametrize("name", ["qwen", "gemma", "mistral_v1", "llama3"])
@pytest.mark.parametrize("text", ["aé日😀", "𓀀", "plain"])
def test_the_bytes_of_all_tokens_are_those_of_the_text(name: str, text: str) -> None:
    tokenizer = HFTokenizer(shape(name).tokenizer)
    tokens = tokenizer.encode(text)
    told = chat_log_probs([TokenLogProb(token, -1.0, [(token, -1.0)]) for token in tokens], tokenizer)["content"]
    assert all(entry["bytes"] == entry["top_logprobs"][0]["bytes"] for entry in told)
    assert bytes(b for entry in told for b in entry["bytes"]).decode().strip() == text
