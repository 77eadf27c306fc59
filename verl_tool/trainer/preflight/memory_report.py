"""The estimate of GPU memory for a training's config: what DRY_RUN prints, what it warns of and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf
from packaging.version import Version
from rich.table import Table
from verl.utils.torch_dtypes import PrecisionType

from verl_tool.trainer.preflight.memory import GB, EngineMemory, Step, TrainedModel
from verl_tool.trainer.preflight.model_shapes import ModelShape, UnknownShapeError, shape_of
from verl_tool.trainer.preflight.packages import is_installed
from verl_tool.trainer.preflight.parallelism import has_critic, has_reference, replica_size
from verl_tool.trainer.preflight.resources import joins_cluster

ASSUMED_CARD_GB = 80.0
WARN_SHARE = 0.9
"""Of the card, above which a phase is warned of."""
_QUERY_SECONDS = 10
_FSDP = ("fsdp", "fsdp2")


@dataclass(frozen=True)
class Card:
    """A GPU's memory, and who says so."""

    size: float
    """Bytes."""
    source: str
    known: bool
    """Whether anybody said so: what does not fit a card that is only assumed is no error."""


@dataclass
class MemoryReport:
    """What is found for a config."""

    table: Table | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def find_card(config: DictConfig) -> Card:
    """The smallest GPU's memory: of ``gpu_memory_gb``, of nvidia-smi, or `ASSUMED_CARD_GB`."""
    if config.gpu_memory_gb is not None:
        return Card(config.gpu_memory_gb * GB, "gpu_memory_gb", known=True)
    if shutil.which("nvidia-smi"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        query = [
            "nvidia-smi",
            *([f"--id={visible}"] if visible else []),
            "--query-gpu=memory.total",
            "--format=csv,noheader,nounits",
        ]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_SECONDS)
            sizes = [int(line) * 2**20 for line in done.stdout.split("\n") if line.strip().isdigit()]
        except (OSError, subprocess.TimeoutExpired):
            sizes = []
        if sizes:
            # The nodes of a cluster may have other cards than the one that the training is started on.
            return Card(min(sizes), "nvidia-smi", known=not joins_cluster(config))
    return Card(ASSUMED_CARD_GB * GB, "assumed, as no GPU is here; GPU_MEMORY_GB says otherwise", known=False)


def report_memory(config: DictConfig) -> MemoryReport:
    """Estimate one GPU's memory. Where that cannot be done, a warning says why."""
    if config.trainer.device != "cuda":
        return MemoryReport()
    try:
        card = find_card(config)
        step = step_of(config, card.size)
    except UnknownShapeError as error:
        return MemoryReport(warnings=[f"GPU memory is not estimated: {error}"])
    problems = step.problems()
    warnings = [*_too_full(step), *_host(config, step)]
    if not card.known:
        warnings = [f"{problem} ({card.source})" for problem in problems] + warnings
        problems = []
    return MemoryReport(make_table(step, card.source), problems, warnings)


def make_table(step: Step, source: str) -> Table:
    """The phases of a step, in GB of one GPU."""
    shape = step.actor.shape
    table = Table(
        title=f"Estimated memory of one GPU in GB, of {step.card / GB:.0f} ({source}); "
        f"{shape.parameters / GB:.2f} billion parameters by {shape.source}",
        caption=f"Arithmetic, not measured: assets/docs/one_gpu.md. Host memory for what is offloaded, all nodes: "
        f"{step.host_bytes() / GB:.0f} GB",
    )
    parts = ("state", "gradients", "gathered", "activations", "logits", "engine", "cache", "overhead", "total")
    table.add_column("phase")
    for part in (*parts, "of card"):
        table.add_column(part, justify="right")
    for phase in step.phases():
        sizes = [getattr(phase, part) / GB for part in parts]
        share = phase.total / step.card
        style = "red" if share > 1 else "yellow" if share > WARN_SHARE else None
        table.add_row(phase.name, *(f"{size:.1f}" if size else "" for size in sizes), f"{share:.0%}", style=style)
    return table


def _too_full(step: Step) -> Iterator[str]:
    engine = step.engine
    if engine is not None and engine.cache(step.card) + engine.working < engine.cache_per_token * engine.max_model_len:
        yield (
            f"the engine may start with no room for a trajectory of {engine.max_model_len} tokens (estimated); raise "
            "GPU_MEMORY or TENSOR_PARALLEL, or lower MAX_RESPONSE_LENGTH"
        )
    for phase in step.phases():
        if phase.total > WARN_SHARE * step.card:
            yield (
                f"the phase {phase.name!r} may need {phase.total / GB:.0f} GB of a GPU's {step.card / GB:.0f} GB "
                f"(estimated); {_remedy(phase.name, step)}"
            )


def _remedy(phase: str, step: Step) -> str:
    if phase == "rollout":
        return "lower GPU_MEMORY, or set OFFLOAD=true"
    if phase.endswith("optimizer"):
        return "train an adapter (LORA_RANK), or use more GPUs"
    if phase.endswith("sync"):
        return "use more GPUs, or set TENSOR_PARALLEL"
    shared = ", share a row by ULYSSES=2" if step.gpus > 1 and is_installed("flash_attn") else ""
    tokens = "MAX_TOKENS_PER_GPU (at least prompt plus response) or MAX_RESPONSE_LENGTH"
    return f"lower {tokens}{shared}, or set FUSED_KERNELS=true"


def _host(config: DictConfig, step: Step) -> Iterator[str]:
    needed, found = step.host_bytes() / config.trainer.nnodes, psutil.virtual_memory().total
    if needed > WARN_SHARE * found:
        yield (
            f"what is offloaded takes {needed / GB:.0f} GB of each node's memory, and this one has {found / GB:.0f} "
            "GB; set OFFLOAD=false, or use more nodes"
        )


def step_of(config: DictConfig, card: float) -> Step:
    """The step of this config on a card of so many bytes. Raises UnknownShapeError."""
    part = config.actor_rollout_ref
    strategies = {part.actor.strategy, *([config.critic.strategy] if has_critic(config) else [])}
    if not strategies <= set(_FSDP):
        raise UnknownShapeError(f"only FSDP is; actor and critic have {', '.join(sorted(strategies))}")
    shape = _shape(part.model)
    rank = _lora_rank(part.model)
    return Step(
        actor=_actor(config, shape, rank),
        card=card,
        engine=_engine(config, shape),
        critic=_critic(config) if has_critic(config) else None,
        reference=_reference(config, shape) if has_reference(config) else None,
        gpus=config.trainer.n_gpus_per_node * config.trainer.nnodes,
        sync_bucket=part.rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20,
    )


def _shape(model: DictConfig) -> ModelShape:
    path = str(model.get("hf_config_path") or model.path)
    return shape_of(path)


def _lora_rank(model: DictConfig) -> int:
    return int(OmegaConf.select(model, "lora.rank", default=0) or model.get("lora_rank", 0) or 0)


def _trained(config: DictConfig, shape: ModelShape, model: DictConfig, fsdp: DictConfig, **more: Any) -> TrainedModel:
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    precision = fsdp.get("mixed_precision") or {}
    attention = OmegaConf.select(model, "override_config.attn_implementation") or "flash_attention_2"
    return TrainedModel(
        shape=shape,
        shards=fsdp.fsdp_size if 0 < fsdp.fsdp_size < gpus else gpus,
        weight_bytes=_bytes_of(fsdp.get("model_dtype") or "fp32"),
        compute_bytes=_bytes_of(precision.get("param_dtype", "bf16")),
        offload_weights=bool(fsdp.param_offload),
        offload_optimizer=bool(fsdp.optimizer_offload),
        reshards=bool(fsdp.reshard_after_forward),
        entropy_in_chunks=bool(fsdp.use_torch_compile or fsdp.entropy_from_logits_with_chunking),
        scaled_copy=_always_scales() or config.actor_rollout_ref.rollout.temperature != 1,
        fused_loss=is_installed("flash_attn"),
        padded=not model.use_remove_padding,
        masks=not str(attention).startswith("flash_attention"),
        row_tokens=config.data.max_prompt_length + config.data.max_response_length,
        **more,
    )


def _always_scales() -> bool:
    return Version(version("verl")) < Version("0.9.1")


def _bytes_of(dtype: str) -> int:
    return PrecisionType.to_dtype(dtype).itemsize


def _actor(config: DictConfig, shape: ModelShape, rank: int) -> TrainedModel:
    part, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    parallel = actor.ulysses_sequence_parallel_size
    mini = actor.ppo_mini_batch_size * part.rollout.n
    update, several = _tokens(config, actor, mini, parallel, actor.ppo_max_token_len_per_gpu, "ppo_micro_batch_size")
    forward, _ = _tokens(
        config,
        part.rollout,
        config.data.train_batch_size * part.rollout.n,
        parallel,
        part.rollout.log_prob_max_token_len_per_gpu,
        "log_prob_micro_batch_size",
        dynamic=actor.use_dynamic_bsz,
    )
    waits = actor.fsdp_config.get("use_no_sync_for_gradient_accumulation", True)
    return _trained(
        config,
        shape,
        part.model,
        actor.fsdp_config,
        fsdp2=actor.strategy == "fsdp2",
        offload_policy=actor.strategy == "fsdp2" and bool(actor.fsdp_config.offload_policy),
        lora_rank=rank,
        checkpointing=bool(part.model.enable_gradient_checkpointing),
        update_tokens=update,
        forward_tokens=forward,
        accumulates=several and waits,
        entropy_in_update=bool(actor.calculate_entropy) or actor.entropy_coeff != 0,
        fused_kernels=bool(part.model.use_fused_kernels),
    )


def _critic(config: DictConfig) -> TrainedModel:
    critic, model = config.critic, config.critic.model
    parallel = critic.ulysses_sequence_parallel_size
    mini = critic.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    update, several = _tokens(config, critic, mini, parallel, critic.ppo_max_token_len_per_gpu, "ppo_micro_batch_size")
    return _trained(
        config,
        _shape(model),
        model,
        critic.fsdp,
        fsdp2=critic.strategy == "fsdp2",
        offload_policy=critic.strategy == "fsdp2" and bool(critic.fsdp.offload_policy),
        lora_rank=_lora_rank(model),
        checkpointing=bool(model.enable_gradient_checkpointing),
        update_tokens=update,
        forward_tokens=update,
        accumulates=several and critic.fsdp.get("use_no_sync_for_gradient_accumulation", True),
        has_head=False,
    )


def _reference(config: DictConfig, shape: ModelShape) -> TrainedModel:
    part, reference = config.actor_rollout_ref, config.actor_rollout_ref.ref
    parallel = reference.get("ulysses_sequence_parallel_size", 1)
    tokens, _ = _tokens(
        config,
        reference,
        config.data.train_batch_size * part.rollout.n,
        parallel,
        reference.log_prob_max_token_len_per_gpu,
        "log_prob_micro_batch_size",
        dynamic=reference.log_prob_use_dynamic_bsz,
    )
    return _trained(config, shape, part.model, reference.fsdp_config, forward_tokens=tokens)


def _tokens(
    config: DictConfig,
    part: DictConfig,
    rows: int,
    parallel: int,
    limit: int,
    micro: str,
    dynamic: bool | None = None,
) -> tuple[int, bool]:
    """The most tokens of a micro-batch on one GPU, and whether there may be several of a mini-batch of `rows`."""
    ranks = max(1, config.trainer.n_gpus_per_node * config.trainer.nnodes // parallel)
    row = config.data.max_prompt_length + config.data.max_response_length
    of_rank = max(1, rows // ranks)
    everything = -(-of_rank * row // parallel)
    if part.use_dynamic_bsz if dynamic is None else dynamic:
        maximum = limit
    else:
        maximum = (part.get(f"{micro}_per_gpu") or max(1, (part.get(micro) or 1) // ranks)) * row // parallel
    return min(maximum, everything), everything > maximum


def _engine(config: DictConfig, shape: ModelShape) -> EngineMemory | None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name not in ("vllm", "sglang"):
        return None
    quantized = rollout.quantization is not None
    return EngineMemory(
        shape=shape,
        tensor_parallel=rollout.tensor_model_parallel_size,
        parts=replica_size(rollout)
        if rollout.expert_parallel_size > 1
        else rollout.tensor_model_parallel_size * rollout.get("pipeline_model_parallel_size", 1),
        weight_bytes=1 if quantized else 4 if str(rollout.dtype) in ("float32", "float") else 2,
        utilization=rollout.gpu_memory_utilization,
        max_model_len=rollout.max_model_len or shape.max_positions or 0,
        max_num_seqs=rollout.max_num_seqs,
        max_batched_tokens=rollout.max_num_batched_tokens,
        eager=bool(rollout.enforce_eager),
        sleeps=bool(rollout.free_cache_engine and rollout.get("enable_sleep_mode", True)),
    )
