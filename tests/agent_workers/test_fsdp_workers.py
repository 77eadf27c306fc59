"""What the worker does with an engine's model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from peft import LoraConfig, get_peft_model  # noqa: E402

from verl_tool.agent_workers.fsdp_workers import AgentActorRolloutRefWorker  # noqa: E402


def adapter_of(module: object) -> object:
    worker = SimpleNamespace(actor=SimpleNamespace(engine=SimpleNamespace(module=module)))
    return AgentActorRolloutRefWorker._adapter(worker)


def test_an_adapter_is_merged_with_fsdp_and_megatron_s_list_of_model_chunks_has_none():
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    adapted = get_peft_model(layer, LoraConfig(target_modules=["0"]))
    assert adapter_of(adapted) is adapted.peft_config["default"]
    assert adapter_of(layer) is None
    assert adapter_of([layer, layer]) is None
