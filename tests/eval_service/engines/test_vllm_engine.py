"""How vLLM is asked to serve. What it answers is tested live: `test_live.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from transformers import Qwen2Config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from eval_service.engines import vllm_engine
from eval_service.settings import VllmSettings

pytestmark = pytest.mark.slow


def scheduler_of(settings: VllmSettings, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's config of the scheduler; no engine is started."""
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)

    class NotStarted:
        def __init__(self, arguments: AsyncEngineArgs, usage_context: UsageContext) -> None:
            self.vllm_config = arguments.create_engine_config(usage_context)

    monkeypatch.setattr(AsyncLLM, "from_engine_args", NotStarted)
    engine = vllm_engine.VllmEngine(str(folder), settings)
    return engine._llm.vllm_config.scheduler_config


@pytest.mark.e2e
def test_it_batches_as_vllm_s_own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(VllmSettings(max_model_len=512), tmp_path, monkeypatch)
    tokens, sequences = AsyncEngineArgs.get_batch_defaults(world_size=1)
    assert scheduler.max_num_seqs == sequences[UsageContext.OPENAI_API_SERVER]
    assert scheduler.max_num_batched_tokens == tokens[UsageContext.OPENAI_API_SERVER]


def test_a_run_s_own_arguments_of_the_engine_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = VllmSettings(max_model_len=512, engine_kwargs={"max_num_seqs": 5})
    assert scheduler_of(settings, tmp_path, monkeypatch).max_num_seqs == 5
    with pytest.raises(vllm_engine.EngineError, match="'max_seqs', which is no argument"):
        scheduler_of(VllmSettings(engine_kwargs={"max_seqs": 5}), tmp_path, monkeypatch)


def test_the_most_sequences_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(VllmSettings(max_model_len=512, max_num_seqs=7), tmp_path, monkeypatch)
    assert scheduler.max_num_seqs == 7
