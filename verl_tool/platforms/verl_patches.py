"""What verl takes for granted about accelerators and flash attention, and offers no way to change; and FSDP1 with LoRA.

Written for verl 0.9.0 and 0.9.1, torch 2.13 and PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet

from verl_tool.platforms.patch import Patch, verl_patch


def _gloo_for_the_cpu(original: Callable[..., None]) -> Callable[..., None]:
    def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialize_global_process_group_ray


def _unpinned(policy: Any) -> type:
    class UnpinnedOffloadPolicy(policy):
        """An offload policy that pins no memory, whatever it is told."""

        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory=False)

    return UnpinnedOffloadPolicy


def _nothing_to_load(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def load_fsdp_model_to_gpu(model: Any) -> None:
        from verl.utils.fsdp_utils import fsdp_version

        if fsdp_version(model) != 1:
            original(model)

    return load_fsdp_model_to_gpu


def _on_any_device(_original: Callable[[Any], None]) -> Callable[[Any], None]:
    def _check_module_states_for_sync_module_states(module_states: Any) -> None: ...

    return _check_module_states_for_sync_module_states


def _padding_without_flash_attention(original: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    def _get_attention_functions() -> tuple[Any, ...]:
        try:
            return original()
        except (ImportError, OSError):
            from verl.utils.npu_flash_attn_utils import index_first_axis, pad_input, rearrange, unpad_input

            return index_first_axis, pad_input, rearrange, unpad_input

    return _get_attention_functions


def _value_model_with_attention_of_config(_original: Callable[..., Any]) -> Callable[..., Any]:
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
        )

    return load_valuehead_model


def _without_wrappers(original: Callable[..., set[str]]) -> Callable[..., set[str]]:
    def _get_tuner_state_dict_key_prefixes(*args: Any, **kwargs: Any) -> set[str]:
        return {prefix.replace("_fsdp_wrapped_module.", "") for prefix in original(*args, **kwargs)}

    return _get_tuner_state_dict_key_prefixes


WITHOUT_ACCELERATOR = (
    verl_patch(
        "utils.distributed",
        "initialize_global_process_group_ray",
        why="it names a backend for the CPU and one for the device, which torch refuses when both are the CPU",
        replace=_gloo_for_the_cpu,
    ),
    verl_patch(
        "utils.fsdp_utils",
        "CPUOffloadPolicy",
        why="the reference model is offloaded to pinned memory, and without an accelerator no memory can be pinned",
        replace=_unpinned,
    ),
    verl_patch(
        "utils.fsdp_utils",
        "load_fsdp_model_to_gpu",
        why="weights of FSDP1 that are offloaded are taken back to a device that it calls cpu:cpu",
        replace=_nothing_to_load,
    ),
    Patch(
        "torch",
        SpecifierSet(">=2.13,<2.14"),
        "torch.distributed.fsdp._init_utils",
        "_check_module_states_for_sync_module_states",
        why="FSDP1 refuses to send the first rank's weights to the others from and to the CPU, which gloo can",
        replace=_on_any_device,
    ),
)
"""In force where `verl_tool.platforms.cpu` is."""
PATCHES = (
    verl_patch(
        "utils.attention_utils",
        "_get_attention_functions",
        versions="==0.9.0",
        # It falls back to plain torch by itself.
        not_needed="==0.9.1",
        why="it imports flash_attn, which may be missing, unless it finds an NPU",
        replace=_padding_without_flash_attention,
    ),
    verl_patch(
        "utils.model",
        "load_valuehead_model",
        why="it loads the critic with flash attention, whatever the config says",
        replace=_value_model_with_attention_of_config,
    ),
    Patch(
        "peft",
        SpecifierSet(">=0.21,<0.22"),
        "peft.tuners.tuners_utils",
        "_get_tuner_state_dict_key_prefixes",
        why="it names an adapter's weights as FSDP1 wraps them, not as state dicts do: vLLM gets an empty adapter",
        replace=_without_wrappers,
    ),
)
