"""What follows from a config and is filled in before anything starts, and what makes it none.

What imports verl is imported where it is used, so that the others start meanwhile.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import psutil
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.verl.config import options_in
from verl_tool.errors import ConfigError
from verl_tool.gateway.settings import GatewaySettings
from verl_tool.servers.serve.local_ray import address_to_join
from verl_tool.servers.serve.ports import free_ports
from verl_tool.trainer.composition import resolve_calculations
from verl_tool.trainer.determinism import make_deterministic
from verl_tool.trainer.monitoring.metric_limits import MetricWatch
from verl_tool.trainer.preflight.backends import adapt_rollout, check_backends
from verl_tool.trainer.preflight.ranges import check_ranges
from verl_tool.trainer.progress.progress import STARTED
from verl_tool.trainer.recipe import TINY
from verl_tool.trainer.run_folder.checkpoints import save_last_step

AGENT_LOOPS = Path(__file__).parent / "config" / "agent_loops.yaml"
"""Names verl's agent loop worker makes ours by."""
CALLS_ON_RECORD = 2000
"""How many past calls a Ray of our own lists: a hundred thousand, as it would, take kilobytes each."""
_FOR_EVERY_PROCESS = ("VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", STARTED, "TQDM_DISABLE")


def complete(config: DictConfig) -> EpisodeOptions:
    """Check the config, by verl's own validator too, and fill in what follows from it; return the loop's options.
    Writes nothing."""
    from verl.utils.device import auto_set_device

    from verl_tool.trainer.ppo.estimators import check_algorithm
    from verl_tool.trainer.preflight.resources import set_cpu_slots
    from verl_tool.trainer.preflight.sampling_mode import check_sampling_mode

    check_ranges(config)
    OmegaConf.set_struct(config, True)
    with open_dict(config):
        _place_files(config)
        try:
            resolve_calculations(config)
        except InterpolationResolutionError as error:
            raise ConfigError(f"a setting cannot be calculated: {error}") from error
        _drop_grad_offload(config)
        auto_set_device(config)
        if config.trainer.device == "cpu":
            _check_cpu(config)
        choose_attention(config)
        options = _choose_tool_server(config)
        if config.actor_rollout_ref.rollout.agent.agent_loop_config_path is None:
            config.actor_rollout_ref.rollout.agent.agent_loop_config_path = str(AGENT_LOOPS)
        _leave_resources_to_cluster(config)
        set_cpu_slots(config)
        save_last_step(config)
        _replace_engine(config)
        adapt_rollout(config)
        if config.deterministic:
            make_deterministic(config)
    check_backends(config)
    if GatewaySettings.is_set(config):
        GatewaySettings.of_config(config)
    _check_lengths(config, options)
    MetricWatch(config.metric_limits)
    if config.algorithm.filter_groups.enable and not config.trainer.use_v1:
        raise ConfigError(
            "algorithm.filter_groups.enable=true with trainer.use_v1=false, which filters no groups; "
            "set trainer.use_v1=true"
        )
    check_algorithm(config)
    check_sampling_mode(config)
    check_with_verl(config)
    return options


def check_with_verl(config: DictConfig) -> None:
    """Run verl's own checks. The check of a critic reads its model: it is left out while the tiny model is not made.

    Raises ConfigError.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    model = Path(config.run_dir) / "model"
    makes_model = (config.get("recipe") or {}).get("model") == TINY and config.critic.model.path == str(model)
    use_critic = need_critic(config) and not (makes_model and not model.exists())
    try:
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=use_critic)
    except (AssertionError, ValueError, InstantiationException) as error:
        raise ConfigError(f"verl refuses the config: {error.__cause__ or error}") from error


def _drop_grad_offload(config: DictConfig) -> None:
    """Remove Megatron's ``grad_offload`` where this verl has no such option: in 0.9.1 ``param_offload`` includes it."""
    from verl.workers.config import McoreEngineConfig

    if "grad_offload" in {field.name for field in dataclasses.fields(McoreEngineConfig)}:
        return
    for part in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        (part.get("megatron") or {}).pop("grad_offload", None)


def _replace_engine(config: DictConfig) -> None:
    """Where trajectories come from disk: no engine, and one process that gives each out once."""
    if config.actor_rollout_ref.replay is None and config.actor_rollout_ref.replay_step is not None:
        raise ConfigError(
            f"actor_rollout_ref.replay_step={config.actor_rollout_ref.replay_step} without actor_rollout_ref.replay, "
            "the folder of the run's trajectories; python -m verl_tool.replay RUN --retrain STEP sets both"
        )
    if config.actor_rollout_ref.replay is not None:
        from verl_tool.agent_workers.no_engine import NAME

        config.actor_rollout_ref.rollout.name = NAME
        config.actor_rollout_ref.rollout.agent.num_workers = 1


def _choose_tool_server(config: DictConfig) -> EpisodeOptions:
    """Give the loop an address of a tool server; return the loop's options."""
    requested, agent = config.tool_server, config.actor_rollout_ref.agent
    provided = agent.tool_server_url or agent.tool_config.server_url
    if requested.start is not None and provided is not None:
        raise ConfigError(
            f"tool_server.start={requested.start!r} starts one, tool_server_url={provided!r} names one; give just one"
        )
    if requested.start is not None:
        requested.port = requested.port or free_ports(1)[0]
        agent.tool_server_url = f"http://127.0.0.1:{requested.port}"
    elif provided is None and GatewaySettings.is_set(config) and not config.gateway.program.get("mcp"):
        agent.enable_agent = False  # the program has its own tools
    options = options_in(config)
    if options.enable_agent and options.tool_server_url is None:
        raise ConfigError(
            "no tool server: set tool_server.start=python_code to start one (empty for tools of MCP servers alone, "
            "with tool_server.args=[--mcp,servers.json]), "
            "actor_rollout_ref.agent.tool_server_url=http://127.0.0.1:5000 to use a running one, "
            "or actor_rollout_ref.agent.enable_agent=false"
        )
    return options


def _check_cpu(config: DictConfig) -> None:
    from verl_tool.platforms import cpu

    cpu.require()
    if config.actor_rollout_ref.actor.strategy not in ("fsdp", "fsdp2"):
        raise ConfigError(
            f"trainer.device=cpu with actor.strategy={config.actor_rollout_ref.actor.strategy!r}; "
            "only fsdp and fsdp2 run without an accelerator: add platform=cpu"
        )


def choose_attention(config: DictConfig, *, cluster_joined: bool = False) -> None:
    """Choose the attention by what is known of the model so far, and by the packages of the nodes that train: those of
    a cluster are known once it is joined. Raises ConfigError."""
    from verl_tool.agent_loop.verl.model_config import model_type
    from verl_tool.platforms import attention
    from verl_tool.trainer.preflight.parallelism import has_critic
    from verl_tool.trainer.preflight.ray_resources import import_problem_of_nodes
    from verl_tool.trainer.preflight.resources import joins_cluster

    find_problem, of_cluster = attention.import_problem, config.trainer.device != "cpu" and joins_cluster(config)
    if of_cluster != cluster_joined:
        return
    if of_cluster:

        def find_problem(module: str) -> str | None:
            return import_problem_of_nodes(module, config)

    model = config.actor_rollout_ref.model
    path, trusted = model.get("hf_config_path") or model.path, bool(model.get("trust_remote_code", False))
    kind = model_type(path, trust_remote_code=trusted)
    attention.choose_attention(config, kind, critic=has_critic(config), find_problem=find_problem)


def _check_lengths(config: DictConfig, options: EpisodeOptions) -> None:
    rollout = config.actor_rollout_ref.rollout
    response, validation = options.max_response_length, options.for_validation().max_response_length
    for name, value, limit, limited_by in (
        ("max_prompt_length", options.max_prompt_length, rollout.prompt_length, "data.max_prompt_length"),
        ("max_response_length", response, rollout.response_length, "data.max_response_length"),
        ("val_max_response_length", validation, rollout.response_length, "data.max_response_length"),
    ):
        if value is None or value > limit:
            raise ConfigError(
                f"actor_rollout_ref.agent.{name}={value} and {limited_by}={limit}: verl's batches hold {limit} tokens; "
                f"set {limited_by} and leave the other out"
            )


def _place_files(config: DictConfig) -> None:
    """Give every process absolute paths: their working directories may differ."""
    config.run_dir = str(Path(config.run_dir).resolve())
    config.trainer.default_local_dir = str(Path(config.trainer.default_local_dir).resolve())
    if config.trajectories_dir:
        config.trajectories_dir = str(Path(config.trajectories_dir).resolve())
    os.environ.setdefault("VERL_FILE_LOGGER_PATH", f"{config.run_dir}/metrics.jsonl")
    os.environ.setdefault("TENSORBOARD_DIR", f"{config.run_dir}/tensorboard")
    os.environ.setdefault("WANDB_DIR", config.run_dir)
    os.environ[STARTED] = str(psutil.Process().create_time())
    os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", str(CALLS_ON_RECORD))
    # Our own bars show more, and those of other processes cannot be drawn over.
    os.environ.setdefault("TQDM_DISABLE", "1")
    environment = {name: os.environ[name] for name in _FOR_EVERY_PROCESS}
    config.ray_kwargs.ray_init = OmegaConf.merge(config.ray_kwargs.ray_init, {"runtime_env": {"env_vars": environment}})


def _leave_resources_to_cluster(config: DictConfig) -> None:
    """A cluster that runs already says itself what it has: Ray refuses to be told."""
    provided = config.ray_kwargs.ray_init
    if address_to_join(provided.get("address")) is not None:
        provided.update({name: None for name in ("num_cpus", "num_gpus", "object_store_memory") if name in provided})
