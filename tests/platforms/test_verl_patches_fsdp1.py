"""FSDP1, verl's default, on two processes of a machine without an accelerator, and LoRA under it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl")
pytest.importorskip("peft")
pytest.importorskip("torch")

import torch

from verl_tool.servers.serve.ports import free_ports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="torch is built for an accelerator"),
]

RANK = """
import verl, torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedStateDictConfig, ShardingStrategy, StateDictType
from transformers import AutoModelForCausalLM, Qwen3Config
from verl.utils import fsdp_utils
from verl.utils.distributed import initialize_global_process_group_ray

initialize_global_process_group_ray(timeout_second=100)
# The second rank has other weights until the first one's come.
torch.manual_seed(torch.distributed.get_rank())
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
model = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules="all-linear"))
names = {name.replace(".default", "") for name in model.state_dict() if "lora_" in name}
first = [None]
if torch.distributed.get_rank() == 0:
    first = [{name: value.clone() for name, value in model.state_dict().items()}]
torch.distributed.broadcast_object_list(first)
wrapped = FSDP(
    model,
    param_init_fn=fsdp_utils.init_fn,
    auto_wrap_policy=fsdp_utils.get_fsdp_wrap_policy(model, None, is_lora=True),
    device_id=torch.device("cpu"),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    sync_module_states=True,
    device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=["fsdp"]),
    use_orig_params=False,
)
FSDP.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
for _ in range(2):
    fsdp_utils.load_fsdp_model_to_gpu(wrapped)
    fsdp_utils.offload_fsdp_model_to_cpu(wrapped)
wrapped(input_ids=torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
assert wrapped.clip_grad_norm_(1.0) > 0
adapter = fsdp_utils.collect_lora_params(wrapped, layered_summon=False, base_sync_done=True)
assert set(adapter) == names, names ^ set(adapter)
for name, value in adapter.items():
    kind = "lora_A" if "lora_A" in name else "lora_B"
    assert torch.equal(value, first[0][name.replace(kind, f"{kind}.default")]), name
print("equal", len(adapter))
"""


def test_two_ranks_divide_a_model_with_an_adapter_and_put_it_together_again():
    port = str(free_ports(1)[0])
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=inherited | rendezvous | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=250)
            assert output.splitlines()[-1:] == ["equal 28"], errors[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
