"""Training and rollout engines: what a config asks of them that they, or the loop, cannot do.

Nothing here imports an engine. What is run, composed or refused: assets/docs/backends.md. Written for verl 0.9.0 and
0.9.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import metadata
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tool.errors import ConfigError
from verl_tool.trainer.preflight.packages import CHECKPOINT_ENGINES

STRATEGIES = {"dp": ("fsdp", "fsdp2"), "megatron": ("megatron",)}
"""verl's `model_engine`: values of ``strategy`` that belong to it."""
ROLLOUTS = ("vllm", "sglang", "replay")
"""Rollout engines whose requests the loop can write; the last gives trajectories from disk."""
QUANTIZATION = ("fp8", "torchao")
_ACTOR, _ROLLOUT, _MEGATRON = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"


def check_backends(config: DictConfig) -> None:
    """Raise ConfigError that names all that the chosen engines cannot do, and what to set instead."""
    problems = list(_engine(config))
    if not problems and config.model_engine == "megatron":
        problems += _megatron(config)
    problems += [*_rollout(config), *_router_replay(config)]
    if problems:
        raise ConfigError("\n       ".join(problems))


def check_combinations(config: DictConfig) -> Iterator[str]:
    """Values that do not exist, or not on this device."""
    part = config.actor_rollout_ref
    if OmegaConf.is_missing(part.rollout, "name"):
        yield f"{_ROLLOUT}.name is not set; set it to vllm"
        return
    quantization = part.rollout.quantization
    if quantization is not None and quantization not in QUANTIZATION:
        yield f"{_ROLLOUT}.quantization={quantization!r} is unknown; known: {', '.join(QUANTIZATION)}, or null"
    elif quantization is not None and config.trainer.device == "cpu":
        yield f"{_ROLLOUT}.quantization={quantization} needs a GPU; leave it out with platform=cpu"
    backend, name = part.rollout.checkpoint_engine.backend, part.rollout.name
    if part.rollout.checkpoint_engine.get("custom_backend_module") is not None:
        return
    if backend not in CHECKPOINT_ENGINES:
        yield (
            f"{_ROLLOUT}.checkpoint_engine.backend={backend!r} is unknown; known: {', '.join(CHECKPOINT_ENGINES)}, or "
            "one that checkpoint_engine.custom_backend_module registers"
        )
    elif name in ("vllm", "sglang") and name not in CHECKPOINT_ENGINES[backend].rollouts:
        yield (
            f"{_ROLLOUT}.checkpoint_engine.backend={backend} with {_ROLLOUT}.name={name}; it is for "
            f"{' and '.join(CHECKPOINT_ENGINES[backend].rollouts)} only"
        )


def adapt_rollout(config: DictConfig) -> None:
    """Set what an engine needs for the loop's requests: SGLang finds stop strings only if it loads its tokenizer.

    Without one (verl's default) its scheduler fails at the first token of a request with a stop string.
    """
    if _rollout_name(config) == "sglang":
        config.actor_rollout_ref.rollout.skip_tokenizer_init = False


def image_problems(config: DictConfig) -> Iterator[str]:
    """Engines that are not known to work with a model that reads images."""
    if config.model_engine != "dp":
        yield (
            f"model_engine={config.model_engine} with {config.actor_rollout_ref.model.path}, which reads images: "
            "images are checked with FSDP only; set model_engine=dp"
        )
    if _rollout_name(config) == "sglang":
        yield (
            f"{_ROLLOUT}.name=sglang with {config.actor_rollout_ref.model.path}, which reads images: images are "
            f"checked with vLLM only; set {_ROLLOUT}.name=vllm"
        )


def sglang_problem(installed: str | None, torch_version: str, requirements: list[str]) -> str | None:
    """Why SGLang cannot be used here, from its `installed` version, torch's, and what verl requires."""
    if installed is not None:
        return None
    pins = dict(
        re.findall(r"^(sglang|torch)(?:\[.*\])?==([\w.]+);.*extra == ['\"]sglang['\"]", "\n".join(requirements), re.M)
    )
    sglang, torch = pins.get("sglang"), pins.get("torch")
    if sglang is None or torch is None:
        return f"{_ROLLOUT}.name=sglang, and SGLang is not installed"
    same = torch_version.partition("+")[0] == torch
    install = (
        f"install sglang=={sglang}"
        if same
        else (
            f"it cannot be used with this version: verl pins sglang=={sglang} with torch=={torch}, and verl-tool is "
            f"written for torch 2.13 (here {torch_version})"
        )
    )
    return f"{_ROLLOUT}.name=sglang, and SGLang is not installed; {install}, or set {_ROLLOUT}.name=vllm"


def missing_sglang(config: DictConfig) -> Iterator[str]:
    """Yield `sglang_problem` of this environment, if the config samples with SGLang."""
    if _rollout_name(config) != "sglang":
        return
    try:
        installed: str | None = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        installed = None
    problem = sglang_problem(installed, metadata.version("torch"), metadata.requires("verl") or [])
    if problem is not None:
        yield problem


def _engine(config: DictConfig) -> Iterator[str]:
    engine = config.model_engine
    if engine not in STRATEGIES:
        yield f"model_engine={engine!r}; the engines that are checked with tools are dp (FSDP) and megatron"
        return
    for part in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        strategy = OmegaConf.select(config, f"{part}.strategy")
        if strategy not in STRATEGIES[engine]:
            right = next((name for name, known in STRATEGIES.items() if strategy in known), None)
            advice = (
                f"set model_engine={right}, which sets it" if right else f"set it to {' or '.join(STRATEGIES[engine])}"
            )
            yield f"{part}.strategy={strategy!r} with model_engine={engine}; {advice}"
            return


def _megatron(config: DictConfig) -> Iterator[str]:
    from verl.workers.config import McoreActorConfig, McoreOptimizerConfig

    model, sizes = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.megatron
    if model.lora_rank or (model.get("lora") or {}).get("rank", 0):
        yield (
            "model_engine=megatron with a LoRA adapter (actor_rollout_ref.model.lora_rank, .lora.rank): Megatron's "
            "checkpoints keep it apart from the base model, and --from_run would serve the base model alone; set "
            "model_engine=dp, or train all weights"
        )
    if config.deterministic:
        yield "deterministic=true with model_engine=megatron, whose kernels are not checked for it; set model_engine=dp"
    exported = "hf_model" in config.actor_rollout_ref.actor.checkpoint.save_contents
    if exported and not sizes.use_mbridge:
        yield (
            f"{_MEGATRON}.use_mbridge=false with hf_model in {_ACTOR}.checkpoint.save_contents: only the bridge writes "
            "Hugging Face's form; set use_mbridge=true, or leave hf_model out"
        )
    for group, kind in ((_ACTOR, McoreActorConfig), (f"{_ACTOR}.optim", McoreOptimizerConfig)):
        unknown = sorted(set(OmegaConf.select(config, group)) - {field.name for field in fields(kind)} - {"_target_"})
        if unknown:
            yield (
                f"{', '.join(f'{group}.{name}' for name in unknown)}: FSDP's, and model_engine=megatron has no such "
                "option; leave it out, or use the Megatron engine's name for it (lr_scheduler_type: lr_decay_style, "
                "min_lr_ratio: min_lr, fsdp_config: megatron)"
            )
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    tensor, pipeline = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    parts = tensor * pipeline * sizes.context_parallel_size
    if gpus % parts:
        yield (
            f"{_MEGATRON}: tensor_model_parallel_size={tensor} times pipeline_model_parallel_size={pipeline} times "
            f"context_parallel_size={sizes.context_parallel_size} does not divide the {gpus} GPUs; change one of them"
        )
    experts = sizes.expert_model_parallel_size * (sizes.expert_tensor_parallel_size or tensor) * pipeline
    if sizes.expert_model_parallel_size > 1 and gpus % experts:
        yield (
            f"{_MEGATRON}: expert_model_parallel_size={sizes.expert_model_parallel_size} times "
            f"expert_tensor_parallel_size={sizes.expert_tensor_parallel_size or tensor} times "
            f"pipeline_model_parallel_size={pipeline} does not divide the {gpus} GPUs; change one of them"
        )


def _rollout(config: DictConfig) -> Iterator[str]:
    name, model = _rollout_name(config), config.actor_rollout_ref.model
    if name is not None and name not in ROLLOUTS:
        yield f"{_ROLLOUT}.name={name!r}; the loop can ask {' and '.join(ROLLOUTS[:2])}"
    if name == "sglang" and (model.lora_rank or (model.get("lora") or {}).get("rank", 0)):
        yield (
            f"{_ROLLOUT}.name=sglang with a LoRA adapter is not checked, and verl 0.9.0 resumes weights that it never "
            f"released; set {_ROLLOUT}.name=vllm, or train all weights"
        )


def _router_replay(config: DictConfig) -> Iterator[str]:
    """R3 trains with the experts that the rollout engine chose, R2 with those of the old log-probabilities."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    setting = f"{_MEGATRON}.router_replay.mode"
    engine_mode = _mode(actor.get("megatron"))
    if _mode(actor) != "disabled" and _mode(actor) != engine_mode:
        yield (
            f"{_ACTOR}.router_replay.mode={_mode(actor)}, which no training engine reads; "
            + (
                f"set {setting}"
                if config.model_engine == "megatron"
                else f"set model_engine=megatron and {setting}: FSDP replays no routes"
            )
        )
    if engine_mode == "R3" and not rollout.enable_rollout_routing_replay:
        yield f"{setting}=R3 needs the rollout engine's routes; set {_ROLLOUT}.enable_rollout_routing_replay=true"
    if engine_mode == "R3" and config.actor_rollout_ref.replay is not None:
        yield f"{setting}=R3 with actor_rollout_ref.replay: stored trajectories hold no routes; set R2 or disabled"
    read = engine_mode == "R3" or rollout.moe_load_balance_metrics_interval > 0
    if rollout.enable_rollout_routing_replay and not read:
        yield (
            f"{_ROLLOUT}.enable_rollout_routing_replay=true, and nothing reads the routes: that needs "
            f"model_engine=megatron with {setting}=R3, or {_ROLLOUT}.moe_load_balance_metrics_interval above 0"
        )


def _rollout_name(config: DictConfig) -> str | None:
    """None while it is verl's mandatory ``???``."""
    name: str | None = OmegaConf.select(config, f"{_ROLLOUT}.name")
    return name


def _mode(group: Any) -> str:
    replay = None if group is None else group.get("router_replay")
    return "disabled" if replay is None else str(replay.mode)
