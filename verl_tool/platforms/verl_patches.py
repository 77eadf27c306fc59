"""What verl takes for granted about accelerators, and offers no way to change. Written for verl 0.9.0 and 0.9.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_tool.platforms.patch import verl_patch


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


def _padding_in_plain_torch(original: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    def _get_attention_functions() -> tuple[Any, ...]:
        from verl.utils.npu_flash_attn_utils import index_first_axis, pad_input, rearrange, unpad_input

        return index_first_axis, pad_input, rearrange, unpad_input

    return _get_attention_functions


def _value_model_with_plain_attention(_original: Callable[..., Any]) -> Callable[..., Any]:
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    return load_valuehead_model


PATCHES = (
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
        "utils.attention_utils",
        "_get_attention_functions",
        # 0.9.1 falls back to plain torch by itself.
        versions="==0.9.0",
        why="it imports flash_attn, which has no CPU build, unless it finds an NPU",
        replace=_padding_in_plain_torch,
    ),
    verl_patch(
        "utils.model",
        "load_valuehead_model",
        why="it loads the critic with flash attention, whatever the config says, and flash attention has no CPU build",
        replace=_value_model_with_plain_attention,
    ),
)
