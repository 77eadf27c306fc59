"""Whether GPUs, rows and tokens can be cut up as the config says, without a remainder.

Written for verl 0.9.0 and 0.9.1, and vLLM 0.28.0; each check names in its comment what would raise, minutes into a run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass

from verl_tool.trainer.preflight.model_shapes import ModelShape

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_FP8_BLOCK = 128
_VOCAB_PADDING = 64


def world_size(config: DictConfig) -> int:
    """GPUs that train, of all nodes."""
    return int(config.trainer.n_gpus_per_node * config.trainer.nnodes)


def has_reference(config: DictConfig) -> bool:
    """Whether the reference is a model of its own; with LoRA it is the actor without its adapter."""
    model = config.actor_rollout_ref.model
    lora = OmegaConf.select(model, "lora.rank", default=0) or model.get("lora_rank", 0) or 0
    return bool(need_reference_policy(config) and lora <= 0 and model.get("lora_adapter_path") is None)


def has_critic(config: DictConfig) -> bool:
    """Whether a critic is trained. verl's own function warns of each estimator without one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(need_critic(config))


def check_engine(config: DictConfig, shape: ModelShape | None) -> Iterator[str]:
    """The engine's parallel sizes against the GPUs and the model, and its limits against a row."""
    rollout = config.actor_rollout_ref.rollout
    try:
        omega_conf_to_dataclass(rollout)
    except Exception as error:  # noqa: BLE001 - Hydra and verl's own checks raise all sorts of
        yield f"{_ROLLOUT}: {getattr(error, '__cause__', None) or error}"
        return
    if rollout.name not in ("vllm", "sglang", "trtllm"):
        return
    tensor, replica = rollout.tensor_model_parallel_size, replica_size(rollout)
    sizes = f"{_ROLLOUT}.tensor_model_parallel_size={tensor} (TENSOR_PARALLEL)"
    if rollout.data_parallel_size > 1:
        sizes += f" times data_parallel_size={rollout.data_parallel_size}"
    gpus, of_node = world_size(config), config.trainer.n_gpus_per_node
    # ActorRolloutRefWorker.init_model and RolloutReplica assert these.
    if gpus % replica:
        yield (
            f"{sizes} does not divide the {gpus} GPUs (trainer.n_gpus_per_node={of_node} times "
            f"trainer.nnodes={config.trainer.nnodes}); set it to a divisor, such as {_divisor(gpus, replica)}"
        )
    elif of_node % replica and replica % of_node:
        yield (
            f"{sizes} spreads a replica of {replica} GPUs unevenly over nodes of {of_node} GPUs; set it to a divisor "
            f"of {of_node}, such as {_divisor(of_node, replica)}"
        )
    elif rollout.data_parallel_size > 1 and min(replica, of_node) % tensor:
        yield f"{sizes}: each node of a replica must hold whole tensor-parallel groups; lower it"
    if shape is not None:
        yield from _model_by_engine(rollout, shape, sizes)
    yield from _engine_lengths(config, shape)


def replica_size(rollout: DictConfig) -> int:
    pipeline = rollout.get("pipeline_model_parallel_size", 1)
    return int(rollout.tensor_model_parallel_size * rollout.data_parallel_size * pipeline)


def _divisor(number: int, below: int) -> int:
    return max(each for each in range(1, min(number, below) + 1) if number % each == 0)


def _model_by_engine(rollout: DictConfig, shape: ModelShape, sizes: str) -> Iterator[str]:
    """vLLM: `ModelConfig.verify_with_parallel_config`, the attention of each model, `VocabParallelEmbedding`, fp8."""
    tensor, where = rollout.tensor_model_parallel_size, f"the model's {{}} (by {shape.source})"
    if shape.heads % tensor:
        yield f"{sizes} does not divide {where.format(f'{shape.heads} attention heads')}; set it to a divisor of both"
    elif shape.kv_heads % tensor and tensor % shape.kv_heads and not shape.latent_kv:
        yield (
            f"{sizes} and {where.format(f'{shape.kv_heads} key-value heads')}: one must divide the other; change "
            "TENSOR_PARALLEL"
        )
    if not rollout.expert_parallel_size > 1 and shape.intermediate % tensor:
        yield f"{sizes} does not divide {where.format(f'MLP of width {shape.intermediate}')}; set it to a divisor"
    if -(-shape.vocab // _VOCAB_PADDING) * _VOCAB_PADDING % tensor:
        yield f"{sizes} does not divide {where.format(f'vocabulary of {shape.vocab}')}, which vLLM pads to 64"
    if rollout.expert_parallel_size > 1 and not shape.experts:
        yield (
            f"{_ROLLOUT}.expert_parallel_size={rollout.expert_parallel_size}, and the model (by {shape.source}) has no "
            "experts; set it to 1"
        )
    # With expert parallelism each expert is whole.
    width = shape.intermediate if rollout.expert_parallel_size > 1 else shape.intermediate // tensor
    if rollout.quantization == "fp8" and (shape.hidden % _FP8_BLOCK or width % _FP8_BLOCK):
        yield (
            f"{_ROLLOUT}.quantization=fp8 takes blocks of {_FP8_BLOCK} weights, and widths of {shape.hidden} and "
            f"{shape.intermediate} over {tensor} GPUs are no multiples; lower TENSOR_PARALLEL, or leave it out"
        )


def _engine_lengths(config: DictConfig, shape: ModelShape | None) -> Iterator[str]:
    rollout, prompt = config.actor_rollout_ref.rollout, config.data.max_prompt_length
    length, batched = rollout.max_model_len, rollout.max_num_batched_tokens
    if length is not None and length <= prompt:
        yield (
            f"{_ROLLOUT}.max_model_len={length} leaves no token behind a prompt of data.max_prompt_length={prompt}; "
            f"set it to prompt plus response, {prompt + config.data.max_response_length}"
        )
    # vLLMHttpServer._validate_configs, which sees the model's config with what overrides it.
    model = config.actor_rollout_ref.model.get("override_config") or {}
    positions = (model.get("model_config") or model).get("max_position_embeddings")
    source = "override_config" if positions else shape.source if shape is not None else ""
    positions = positions or (shape.max_positions if shape is not None else None)
    if positions and length is not None and length > positions:
        yield (
            f"{_ROLLOUT}.max_model_len={length} is above the model's max_position_embeddings={positions} (by "
            f"{source}); lower MAX_PROMPT_LENGTH or MAX_RESPONSE_LENGTH, or take a model with longer contexts"
        )
    if rollout.name != "vllm":
        return
    # vLLM's SchedulerConfig.verify_max_model_len
    longest = length or positions
    if not rollout.enable_chunked_prefill and longest is not None and batched < longest:
        yield (
            f"{_ROLLOUT}.max_num_batched_tokens={batched} is below max_model_len={longest}, and "
            "enable_chunked_prefill=false takes a prompt at once; raise it, or set enable_chunked_prefill=true"
        )
    if batched < rollout.max_num_seqs:
        yield (
            f"{_ROLLOUT}.max_num_batched_tokens={batched} is below max_num_seqs={rollout.max_num_seqs}; vLLM takes a "
            "token of each sequence at least: raise the first or lower the second"
        )


@dataclass(frozen=True)
class _Trained:
    """A model that FSDP runs, with its settings by their names in the config."""

    name: str
    sequence_parallel: int
    """Ulysses' size: GPUs that share a row."""
    fsdp_size: int
    remove_padding: bool
    token_limits: tuple[tuple[str, int | None], ...]
    """Of micro-batches, where their size is dynamic."""


def _models(config: DictConfig) -> Iterator[_Trained]:
    part = config.actor_rollout_ref
    actor, rollout, reference = part.actor, part.rollout, part.ref
    padding = bool(part.model.use_remove_padding)
    limits = (
        (f"{_ACTOR}.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu),
        (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", rollout.log_prob_max_token_len_per_gpu),
    )
    if actor.strategy in ("fsdp", "fsdp2"):
        parallel = max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size)
        yield _Trained(_ACTOR, parallel, actor.fsdp_config.fsdp_size, padding, limits if actor.use_dynamic_bsz else ())
    if has_reference(config) and reference.strategy in ("fsdp", "fsdp2"):
        name = "actor_rollout_ref.ref"
        of_reference = ((f"{name}.log_prob_max_token_len_per_gpu", reference.log_prob_max_token_len_per_gpu),)
        parallel = reference.ulysses_sequence_parallel_size
        dynamic = of_reference if reference.log_prob_use_dynamic_bsz else ()
        yield _Trained(name, parallel, reference.fsdp_config.fsdp_size, padding, dynamic)
    critic = config.critic
    if has_critic(config) and critic.strategy in ("fsdp", "fsdp2"):
        # Both trainers give the engine this limit, and the older one's forward pass too.
        names = ("ppo_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu")
        of_critic = tuple((f"critic.{name}", critic.get(name)) for name in names)
        parallel, padding = critic.ulysses_sequence_parallel_size, bool(critic.model.use_remove_padding)
        yield _Trained("critic", parallel, critic.fsdp.fsdp_size, padding, of_critic if critic.use_dynamic_bsz else ())


def check_training(config: DictConfig, shape: ModelShape | None) -> Iterator[str]:
    """Sequence parallelism, FSDP's groups and the token limits of micro-batches."""
    gpus, row = world_size(config), config.data.max_prompt_length + config.data.max_response_length
    for model in _models(config):
        size, name = model.sequence_parallel, f"{model.name}.ulysses_sequence_parallel_size"
        if gpus % size:
            yield f"{name}={size} (ULYSSES) does not divide the {gpus} GPUs; set it to a divisor"
        if size > 1 and not model.remove_padding:  # FSDPEngine.__init__
            yield f"{name}={size} needs use_remove_padding=true of its model; set it, or {name}=1"
        # verl.models.transformers.monkey_patch.apply_monkey_patch
        if shape is not None and (shape.heads % size or (shape.kv_heads % size and size % shape.kv_heads)):
            yield (
                f"{name}={size} (ULYSSES) must divide the model's {shape.heads} attention heads, and divide its "
                f"{shape.kv_heads} key-value heads or be a multiple (by {shape.source}); change it"
            )
        if model.fsdp_size > 0 and gpus % min(model.fsdp_size, gpus):
            size_of = f"{model.name}: fsdp_size={model.fsdp_size}"
            yield f"{size_of} does not divide the {gpus} GPUs; set it to a divisor, or -1"
        for setting, limit in model.token_limits:
            if limit is not None and limit * size < row:  # rearrange_micro_batches
                times = f" times ulysses_sequence_parallel_size={size}" if size > 1 else ""
                yield (
                    f"{setting}={limit}{times} is below one row of {row} tokens (data.max_prompt_length="
                    f"{config.data.max_prompt_length} plus "
                    f"data.max_response_length={config.data.max_response_length}), which is never cut up; set it to at "
                    f"least {-(-row // size)}"
                )
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if bool(actor.use_dynamic_bsz) != bool(rollout.log_prob_use_dynamic_bsz):  # ActorRolloutRefWorker.init_model
        yield (
            f"{_ACTOR}.use_dynamic_bsz={actor.use_dynamic_bsz} and {_ROLLOUT}.log_prob_use_dynamic_bsz="
            f"{rollout.log_prob_use_dynamic_bsz} must be the same; leave the second out"
        )


def check_batches(config: DictConfig) -> Iterator[str]:
    """How a step's rows are shared by ranks, cut into mini-batches and these into micro-batches.

    The newer trainer fills a step's rows up to what divides (`PPOTrainer._get_required_batch_multiple`), so that only
    mini-batches and micro-batches must come out even; with the older one the whole batch must.
    """
    mode = config.trainer.v1.trainer_mode if config.trainer.use_v1 else ""
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if not config.trainer.use_v1 and batch % mini:
        yield f"data.train_batch_size={batch} is no multiple of {_ACTOR}.ppo_mini_batch_size={mini}; change one of them"
        return
    sync_every = OmegaConf.select(config, f"trainer.v1.{mode}.parameter_sync_step", default=1) if mode else 1
    if batch % sync_every:  # PPOTrainer.step
        yield (
            f"data.train_batch_size={batch} is no multiple of trainer.v1.{mode}.parameter_sync_step={sync_every}; "
            "change one of them"
        )
        return
    parts = [(_ACTOR, config.actor_rollout_ref.actor)]
    if has_critic(config):
        parts.append(("critic", config.critic))
    for name, part in parts:
        yield from _mini_batches(config, name, part)
    if not config.actor_rollout_ref.actor.use_dynamic_bsz:
        yield from _forward_batches(config, batch // sync_every, [part for _, part in parts])


def _ranks(config: DictConfig, part: DictConfig) -> int:
    """Data-parallel ranks of a model; 0 if its strategy shares rows in another way."""
    if part.strategy not in ("fsdp", "fsdp2"):
        return 0
    return world_size(config) // part.get("ulysses_sequence_parallel_size", 1)


def _mini_batches(config: DictConfig, name: str, part: DictConfig) -> Iterator[str]:
    n, mini, ranks = config.actor_rollout_ref.rollout.n, part.ppo_mini_batch_size, _ranks(config, part)
    micro = part.ppo_micro_batch_size_per_gpu
    if not config.trainer.use_v1 and config.data.train_batch_size % mini:
        batch = config.data.train_batch_size
        yield f"data.train_batch_size={batch} is no multiple of {name}.ppo_mini_batch_size={mini}; change one of them"
    elif ranks and mini * n % ranks:  # TrainingWorker.train_mini_batch
        yield (
            f"{name}.ppo_mini_batch_size={mini} times {_ROLLOUT}.n={n} rows cannot be shared equally by {ranks} "
            f"data-parallel ranks; change one of them (MINI_BATCH_SIZE, N, N_GPUS{', ULYSSES' if ranks > 1 else ''})"
        )
    elif ranks and micro and not part.use_dynamic_bsz and mini * n // ranks % micro:  # prepare_micro_batches
        yield (
            f"the {mini * n // ranks} rows that each rank has of a mini-batch are no multiple of "
            f"{name}.ppo_micro_batch_size_per_gpu={micro}; change it, or set {name}.use_dynamic_bsz=true"
        )


def _forward_batches(config: DictConfig, prompts: int, parts: list[DictConfig]) -> Iterator[str]:
    """Log-probabilities: a rank's rows of the whole batch, in micro-batches of a fixed size."""
    rollout, ranks = config.actor_rollout_ref.rollout, _ranks(config, config.actor_rollout_ref.actor)
    if not ranks:
        return
    rows = prompts * rollout.n
    if config.trainer.use_v1:
        multiple = math.lcm(ranks, *(part.ppo_mini_batch_size * rollout.n for part in parts))
        rows = -(-rows // multiple) * multiple
    settings = [(_ROLLOUT, rollout)]
    if has_reference(config) and not config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz:
        settings.append(("actor_rollout_ref.ref", config.actor_rollout_ref.ref))
    for name, part in settings:
        micro = part.log_prob_micro_batch_size_per_gpu
        if micro and rows % ranks == 0 and rows // ranks % micro:
            yield (
                f"the {rows // ranks} rows that each rank has of a step are no multiple of "
                f"{name}.log_prob_micro_batch_size_per_gpu={micro}; change it, or set {_ACTOR}.use_dynamic_bsz=true"
            )
