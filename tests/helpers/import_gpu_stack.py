"""Import all modules of this project, and those of verl and vLLM that run on GPUs, as a training process does.

Run it with the Python of the environment in question. It prints a JSON object: ``versions``, and ``failures`` by
module.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import version

ENGINE = (
    *(
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.worker.gpu_model_runner",
        "vllm.v1.engine.core",
        "vllm.v1.engine.async_llm",
    ),
    *("vllm.entrypoints.openai.api_server", "vllm.lora.lora_model", "vllm.lora.worker_manager"),
    "vllm.model_executor.layers.quantization.fp8",
    *(
        f"vllm.model_executor.models.{name}"
        for name in ("qwen2", "qwen3", "qwen3_moe", "llama", "qwen2_5_vl", "qwen3_vl")
    ),
)
TRAINER = (
    *("verl.trainer.main_ppo", "verl.trainer.ppo.ray_trainer", "verl.experimental.agent_loop.agent_loop"),
    *("verl.workers.engine_workers", "verl.workers.engine.fsdp.transformer_impl", "verl.utils.fsdp_utils"),
    *("verl.workers.rollout.vllm_rollout.vllm_rollout", "verl.workers.rollout.vllm_rollout.vllm_async_server"),
    *("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", "verl.utils.vllm.utils", "verl.utils.model"),
    *("verl.utils.attention_utils", "verl.models.transformers.qwen2_vl", "verl.models.transformers.monkey_patch"),
)


def modules_of(package: str) -> Iterator[str]:
    """Return the names of all modules below `package` that can be imported without running a program."""
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not found.name.endswith("__main__"):
            yield found.name


def main() -> None:
    """Import them and print the failures."""
    sys.argv = sys.argv[:1]
    failures = {}
    from vllm.plugins import load_general_plugins

    import verl

    load_general_plugins()
    for name in (*ENGINE, *TRAINER, *modules_of("verl_tool"), *modules_of("eval_service")):
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: BLE001
            failures[name] = traceback.format_exc(limit=-3)
    versions = {name: version(name) for name in ("torch", "vllm", "transformers", "verl", "ray")}
    report = json.dumps({"versions": versions, "plugin": verl.__version__, "failures": failures})
    print(report, file=sys.__stdout__, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
