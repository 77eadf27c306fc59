"""All three fronts know the end tokens that engines take from a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("verl")

from transformers import Qwen2Config, Qwen2ForCausalLM
from verl_loop import ScriptedEngine, make_loop, make_tokenizer

from eval_service.model.tokenizer import load_tokenizer
from verl_tool.agent_loop.generators.end_tokens import generation_end_tokens
from verl_tool.notebook.text_environment import TextEnvironment

QUESTION = [{"role": "user", "content": "?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose generation config names two end tokens that its tokenizer does not."""
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    return tmp_path


def test_the_generation_config_comes_before_the_config(tmp_path: Path) -> None:
    assert generation_end_tokens(str(tmp_path)) == ()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 5}))
    assert generation_end_tokens(str(tmp_path)) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert generation_end_tokens(str(tmp_path)) == (7, 9)


def test_the_endpoint_knows_them_and_the_template_of_the_run(folder: Path) -> None:
    own = make_tokenizer().eos_token_id
    tokenizer = load_tokenizer(str(folder), chat_template="{{ messages[0].content }}!")
    assert tokenizer.eos_token_ids == {own, 7, 9}
    assert tokenizer.apply_chat_template(QUESTION, add_generation_prompt=False) == "?!"


async def test_training_ends_a_turn_at_them(folder: Path) -> None:
    tokenizer = make_tokenizer()
    loop = make_loop(
        tokenizer,
        ScriptedEngine(tokenizer),
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.agent.enable_agent=false",
    )
    assert loop._worker.tokenizer.eos_token_ids == {tokenizer.eos_token_id, 7, 9}
    assert loop._worker.episode._writer.parse([40, 41, 9], []).text == tokenizer.decode([40, 41])


def test_the_notebook_takes_them_from_its_model() -> None:
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=260, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = [7, 9]
    assert TextEnvironment(model, tokenizer)._tokenizer.eos_token_ids == {tokenizer.eos_token_id, 7, 9}
    given = TextEnvironment(model, tokenizer, generation_kwargs={"eos_token_id": 3})
    assert given._tokenizer.eos_token_ids == {3}
    assert TextEnvironment(model, tokenizer, generation_kwargs={"eos_token_id": -1})._tokenizer.eos_token_ids == set()
