"""``python -m verl_tool.trainer.main_ppo``: train a model that acts through tools.

The config is verl's own `ppo_trainer` with three groups added; see `config/agent_ppo_trainer.yaml`. On a machine
without an accelerator, add ``platform=cpu``.

What imports verl is imported where it is used, so that the others start meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
import psutil
import ray
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError
from ray.exceptions import RayError, RayTaskError
from rich.console import Console

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.row import MEDIA_COLUMNS
from verl_tool.agent_loop.verl.config import options_in
from verl_tool.agent_loop.verl.model_config import is_hub_name
from verl_tool.checks.row_files import (
    RowFile,
    check_columns,
    check_row_count,
    check_rows,
    columns_for_reward,
    row_files,
)
from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.http.supervised_server import SupervisedServer, serve_command
from verl_tool.platforms.preload.template import template
from verl_tool.servers.serve.local_ray import address_to_join
from verl_tool.servers.serve.ports import free_ports
from verl_tool.trainer.composition import known_names, resolve_calculations
from verl_tool.trainer.determinism import make_deterministic
from verl_tool.trainer.monitoring.metric_limits import MetricWatch
from verl_tool.trainer.monitoring.time_by_phase import phase_table
from verl_tool.trainer.preflight.backends import adapt_rollout, check_backends, image_problems
from verl_tool.trainer.preflight.patch_check import check_versions, imports_checked
from verl_tool.trainer.preflight.ranges import check_ranges
from verl_tool.trainer.preflight.running_services import check_reward_servers, check_tool_server
from verl_tool.trainer.progress.console import loud_console, quiet_console
from verl_tool.trainer.progress.progress import STARTED
from verl_tool.trainer.progress.progress_bars import ProgressBars, display_for
from verl_tool.trainer.ray_settings import ray_settings
from verl_tool.trainer.recipe import make_inputs, make_tool_data, report, tool_data_to_make
from verl_tool.trainer.run_folder.checkpoints import latest_step, save_last_step
from verl_tool.trainer.run_folder.disk_full import is_disk_full
from verl_tool.trainer.run_folder.earlier_starts import archive_earlier_start
from verl_tool.trainer.run_folder.run_lock import run_lock
from verl_tool.trainer.run_folder.saved_config import save_config
from verl_tool.trainer.tool_prompts import attach_tool_descriptions
from verl_tool.util.hub import go_offline_without_hub

log = logging.getLogger(__name__)

LOG = "main_ppo.log"
AGENT_LOOPS = Path(__file__).parent / "config" / "agent_loops.yaml"
"""Names verl's agent loop worker makes ours by."""

RAY_START_TRIES = 3
DRY_RUN_WIDTH = 132
"""Columns of the table of memory where nothing says how many there are."""
CALLS_ON_RECORD = 2000
"""How many past calls a Ray of our own lists: a hundred thousand, as it would, take kilobytes each."""
_MODELS = tuple(
    f"{role}.model.{name}" for role in ("actor_rollout_ref", "critic") for name in ("path", "tokenizer_path")
)
"""Settings that may name a model of a hub."""
_FOR_EVERY_PROCESS = ("VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", STARTED, "TQDM_DISABLE")


def main() -> None:
    """Train as the command line says."""
    sys.argv[1:] = [quoted(argument) for argument in sys.argv[1:]]
    try:
        train_as_configured()
    except SystemExit as ended:
        # Hydra has printed what it raised, and its own advice.
        if names := known_names(ended.__context__):
            print(f"error: {names}", file=sys.stderr)
        raise


def quoted(argument: str) -> str:
    """``tool_server.start=a,b`` as Hydra wants it: else it takes a comma for a sweep over values. An option of a reward
    manager gets the ``+`` of what stands in no file: each has its own."""
    name, equals, value = argument.partition("=")
    if f"{name}.".startswith("reward.reward_kwargs."):
        return f"++{argument}"
    if name == "tool_server.start" and "," in value and value[0] not in "['\"":
        return f"{name}{equals}'{value}'"
    return argument


@hydra.main(config_path="config", config_name="agent_ppo_trainer", version_base=None)
def train_as_configured(config: DictConfig) -> None:
    """Train as the config says. Exit code 1, with the reason, for an error of ours or of a worker."""
    signal.signal(signal.SIGTERM, _interrupt)
    if any(is_hub_name(str(path)) for name in _MODELS if (path := OmegaConf.select(config, name))):
        go_offline_without_hub()
    try:
        if config.dry_run:
            dry_run(config)
            return
        with run_lock(Path(config.run_dir).resolve(), functools.partial(print, file=sys.stderr, flush=True)):
            train_in_folder(config)
            code = report(config)
        if code:
            sys.exit(code)
    except Exception as error:
        if is_disk_full(error):
            sys.exit(disk_full_message(config, error))
        if isinstance(error, RayTaskError):
            sys.exit(f"{innermost(error)}\nerror: the training ended: {cause_of(error)}")
        if isinstance(error, RayError):
            sys.exit(f"error: the training ended: {error}")
        if isinstance(error, VerlToolError):
            sys.exit(f"error: {error}")
        raise
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to go on from the last checkpoint")


def train_in_folder(config: DictConfig) -> None:
    """Train in the run's folder, which this process has for itself."""
    with console_of(config) as console, preloaded(config):
        prepare(config, console)
        with tool_server(config, console) as wait_until_up, patched_modules(config) as wait_for_imports:
            check_versions()
            prepare_inputs(config, console)
            files = check_data(config)

            def prepare_tools() -> None:
                wait_for_imports()
                wait_until_up()
                attach_tool_descriptions(config, files)
                run_preflight_checks(config, files, server_is_up=True)
                take_over_folder(config, console)

            train(config, console, prepare_tools)


def disk_full_message(config: DictConfig, error: Exception) -> str:
    """What ended the training, how much room is left where, how to go on, and what was raised."""
    from verl_tool.trainer.preflight.memory import GB
    from verl_tool.trainer.preflight.resources import free_bytes

    checkpoints = Path(config.trainer.default_local_dir).resolve()
    try:
        step = latest_step(checkpoints)
        resume = "it goes on from the start" if step is None else f"it goes on from {checkpoints}/global_step_{step}"
    except (ConfigError, OSError) as why:
        resume = str(why)
    folders = dict.fromkeys((Path(config.run_dir).resolve(), checkpoints, Path(tempfile.gettempdir())))
    cause, _, _ = cause_of(error).partition("\n")
    left = ", ".join(f"{free_bytes(folder) / GB:.1f} GB left at {folder}" for folder in folders)
    return (
        f"error: the training ended: a disk is full ({left}); make room and run the same command again: "
        f"{resume} ({cause})"
    )


@contextlib.contextmanager
def console_of(config: DictConfig) -> Iterator[Console]:
    """The console as the config asks for it. An error of a worker is in the log with all that it went through."""
    log = Path(config.run_dir).resolve() / LOG
    if config.console == "all":
        with loud_console() as console:
            yield console
        return
    if config.console != "steps":
        raise ConfigError(f"console={config.console!r}; it must be steps or all")
    with quiet_console(log) as console:
        console.print(f"run {log.parent}: all that is printed goes to {log.name}", soft_wrap=True, highlight=False)
        try:
            yield console
        except RayTaskError as error:
            with contextlib.suppress(OSError):  # the disk of the log may be what is full
                print(error, file=sys.stderr, flush=True)
            raise


def innermost(error: RayTaskError) -> RayTaskError:
    """The error of the process where it began: an error holds those of all processes that it went through."""
    while isinstance(error.cause, RayTaskError):
        error = error.cause
    return error


def cause_of(error: Exception) -> str:
    """What began it, in a line or two."""
    cause = innermost(error).cause if isinstance(error, RayTaskError) else error
    return str(cause) if isinstance(cause, VerlToolError) else f"{type(cause).__name__}: {cause}"


def dry_run(config: DictConfig) -> None:
    """Print the config, and look for all that a training with it would refuse; write and start nothing.

    Files and a model that are not there yet are told of only: recipes make them. Raises ConfigError.
    """
    from verl_tool.trainer.config_validation import check_parts, missing_files, missing_model

    with patched_modules(config) as wait_for_imports:  # which takes longest
        complete(config)
        print(OmegaConf.to_yaml(config, resolve=True), flush=True)
        for problem in (*missing_files(config), *missing_model(config)):
            print(f"not there yet: {problem}", file=sys.stderr)
        folder = tool_data_to_make(config)
        if folder is not None:
            print(
                f"not there yet: recipe.tool_data: the recipe makes {folder} for its tools, then they are checked",
                file=sys.stderr,
            )
        preflight = check_parts(config, tool_data_is_there=folder is None)
        for warning in preflight.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if preflight.memory is not None:
            Console(stderr=True, width=None if sys.stderr.isatty() else DRY_RUN_WIDTH).print(preflight.memory)
        check_versions()
        wait_for_imports()
    if folder is not None:
        return
    run_preflight_checks(config, _check_rows(config), server_is_up=False)


def run_preflight_checks(config: DictConfig, files: Sequence[RowFile], *, server_is_up: bool) -> None:
    """The doctor's checks. Raises ConfigError."""
    from verl_tool.trainer.preflight_checks import check_setup

    check_setup(config, files, server_is_up=server_is_up)


def prepare(config: DictConfig, console: Console) -> None:
    """`complete` the config, and make what its tools read. Raises ConfigError or RecipeError before anything starts."""
    from verl_tool.trainer.config_validation import check_parts
    from verl_tool.trainer.resume_check import check_same_run

    complete(config)
    make_tool_data(config, console)
    for warning in check_parts(config).warnings:
        log.warning("%s", warning)
    check_same_run(config)
    check_tool_server(config)
    check_reward_servers(config)


def take_over_folder(config: DictConfig, console: Console) -> None:
    """Move what an earlier start left, and leave the whole config for whoever serves or continues the run.

    The last thing before the training: a start that is refused leaves an earlier one as it was.
    """
    if (earlier := archive_earlier_start(config)) is not None:
        console.print(f"what an earlier start left is in {earlier}", soft_wrap=True, highlight=False)
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    set_aside(folder / "metrics.jsonl")
    save_config(config)


def prepare_inputs(config: DictConfig, console: Console) -> None:
    """`make_inputs`, whose time is told by itself and is no part of the training's set-up."""
    began = time.time()
    if not make_inputs(config, console):
        return
    seconds = time.time() - began
    console.print(f"data and model made in {seconds:.1f} s", highlight=False)
    os.environ[STARTED] = str(float(os.environ[STARTED]) + seconds)
    config.ray_kwargs.ray_init.runtime_env.env_vars[STARTED] = os.environ[STARTED]


def check_data(config: DictConfig) -> tuple[RowFile, ...]:
    """Look at the rows of all local files that the run reads, and whether its model is there; return those files.
    Raises ConfigError that names what is missing, or a row that cannot be used."""
    from verl_tool.trainer.config_validation import check_files

    check_files(config)
    _choose_attention(config)
    return _check_rows(config)


def _check_rows(config: DictConfig) -> tuple[RowFile, ...]:
    from verl_tool.agent_loop.verl.image_reading import UNKNOWN, why_no_images

    data, model = config.data, config.actor_rollout_ref.model
    media = {*MEDIA_COLUMNS, *(data.get(f"{kind}_key", f"{kind}s") for kind in ("image", "video", "audio"))}
    trusted = bool(model.get("trust_remote_code", False))
    why = why_no_images(model.get("hf_config_path") or model.path, trust_remote_code=trusted)
    if why is None:
        _check_with_images(config)
    if why in (None, UNKNOWN):
        media.remove(data.get("image_key", "images"))
    required = (data.prompt_key, *columns_for_reward(config))
    files = row_files(config)
    for file in files:
        if file.path.is_file():
            check_columns(file, required)
            check_rows(file, data.prompt_key, tuple(media), None if why in (None, UNKNOWN) else f"the model {why}")
    check_row_count(config, files)
    return files


def _check_with_images(config: DictConfig) -> None:
    """Raises ConfigError for a setting that does not work with a model that reads images."""
    from verl.trainer.ppo.utils import need_critic

    model = config.actor_rollout_ref.model
    if problems := list(image_problems(config)):
        raise ConfigError("\n       ".join(problems))
    if model.get("use_fused_kernels", False):
        raise ConfigError(
            f"actor_rollout_ref.model.use_fused_kernels=true with {model.path}, which reads images: the engine gives "
            "the tokens that stand for them no probability, and these kernels would; set it to false"
        )
    if need_critic(config):
        raise ConfigError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs a critic, and verl makes none for "
            f"{model.path}, which reads images; take an estimator without one (grpo, rloo, reinforce_plus_plus, …)"
        )


def complete(config: DictConfig) -> None:
    """Check the config, by verl's own validator too, and fill in what follows from it. Writes nothing."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
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
        _choose_attention(config)
        _choose_tool_server(config)
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
    _check_lengths(config, options_in(config))
    MetricWatch(config.metric_limits)
    if config.algorithm.filter_groups.enable and not config.trainer.use_v1:
        raise ConfigError(
            "algorithm.filter_groups.enable=true with trainer.use_v1=false, which filters no groups; "
            "set trainer.use_v1=true"
        )
    check_algorithm(config)
    check_sampling_mode(config)
    try:
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    except (AssertionError, ValueError, InstantiationException) as error:
        raise ConfigError(f"verl refuses the config: {error.__cause__ or error}") from error


def _drop_grad_offload(config: DictConfig) -> None:
    """Remove Megatron's ``grad_offload`` where this verl has no such option: in 0.9.1 ``param_offload`` includes it."""
    from verl.workers.config import McoreEngineConfig

    if "grad_offload" in {field.name for field in dataclasses.fields(McoreEngineConfig)}:
        return
    for part in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        (part.get("megatron") or {}).pop("grad_offload", None)


def preloaded(config: DictConfig) -> contextlib.AbstractContextManager[None]:
    """Within the block, processes are forked from one that has its imports done, if the config says so."""
    if not config.preload or address_to_join(config.ray_kwargs.ray_init.get("address")) is not None:
        return contextlib.nullcontext()  # the processes of a cluster are its raylets'
    return template(OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars))  # type: ignore[arg-type]


def patched_modules(config: DictConfig) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """`imports_checked`, unless the processes that this one forks from import the same."""
    forks = config.preload and address_to_join(config.ray_kwargs.ray_init.get("address")) is None
    return contextlib.nullcontext(lambda: None) if forks else imports_checked()


@contextlib.contextmanager
def tool_server(config: DictConfig, console: Console) -> Iterator[Callable[[], None]]:
    """The tool server that the config asks for, if any, for as long as the block runs.

    It starts meanwhile: it is up when the function that this gives returns, which raises ToolServerError if it fails.
    """
    from verl_tool.trainer.config_validation import args_of

    requested = config.tool_server
    if requested.start is None:
        yield lambda: None
        return
    agent, run = config.actor_rollout_ref.agent, Path(config.run_dir)
    url_file, log = run / "tool_server.url", run / "tool_server.log"
    # The same for whoever goes on with this run, so that what this start leaves behind is replaced.
    app_name = f"verl_tool-{hashlib.sha256(str(run).encode()).hexdigest()[:12]}"
    args = ["--url_file", str(url_file), *args_of(config)]
    command = serve_command(requested.start, requested.port, args, app_name=app_name)
    server = SupervisedServer(
        command,
        agent.tool_server_url,
        log,
        start_timeout=requested.start_timeout,
        max_restarts=requested.max_restarts,
        url_file=url_file,
    )

    def wait_until_up() -> None:
        server.wait_until_up()
        if server.url != agent.tool_server_url:
            agent.tool_server_url = server.url
        served = requested.start or "tools of MCP servers"
        console.print(f"tool server: {server.url} ({served}), log in {log.name}", soft_wrap=True, highlight=False)

    server.start()
    try:
        yield wait_until_up
    finally:
        server.stop()


def train(config: DictConfig, console: Console, wait_for_tools: Callable[[], None]) -> None:
    """Train to the end and tell where the time went. Leaves no Ray of ours behind.

    `wait_for_tools` returns when the tool server is up and has told its tools, which Ray's start does not wait for.
    """
    from verl_tool.trainer.task_runner import AgentTaskRunner, AgentTaskRunnerV1

    runner = AgentTaskRunnerV1 if config.trainer.use_v1 else AgentTaskRunner
    local = not ray.is_initialized()
    visible = ProgressBars(display_for(console)) if options_in(config).enable_tqdm else contextlib.nullcontext()
    try:
        with visible, ray_settings(config):
            _run(config, RunnerActor(ray.remote(num_cpus=1)(runner), wait_for_tools, config))
    finally:
        if local:
            ray.shutdown()
    run = Path(config.run_dir)
    if (run / "metrics.jsonl").exists():
        console.print(phase_table(run))


def _run(config: DictConfig, runner: RunnerActor) -> None:
    """verl's `run_ppo`; again, if Ray did not come up in the time that it gives its own processes."""
    from verl.trainer.main_ppo import run_ppo

    for tries_left in reversed(range(RAY_START_TRIES)):
        try:
            run_ppo(config, task_runner_class=runner)
        except Exception as error:
            # Ray raises a bare Exception if its processes are late, as they may be on a busy machine.
            late = type(error) is Exception
            if ray.is_initialized() or not (late or isinstance(error, (ConnectionError, TimeoutError))):
                raise
            if not late or not tries_left:
                raise RayStartError(_why_no_ray(error)) from error
            print(f"Ray did not start, trying again: {error}", file=sys.stderr, flush=True)
            ray.shutdown()
        else:
            return


class RayStartError(VerlToolError):
    """Ray did not start, or the cluster that is to be joined does not answer."""


def _why_no_ray(error: Exception) -> str:
    words = str(error).strip().splitlines()
    return (
        "Ray did not start, or the cluster of RAY_ADDRESS does not answer: "
        f"{words[0] if words else type(error).__name__}. Its logs are in /tmp/ray/session_latest/logs; a busy "
        "machine or a full /tmp or /dev/shm are the usual reasons. Of a cluster, see `ray status`"
    )


class RunnerActor:
    """An actor class, which verl starts right behind Ray: Ray has put its own handler of SIGTERM in place of ours."""

    def __init__(self, actor_class: Any, wait_for_tools: Callable[[], None], config: DictConfig) -> None:
        self._actor_class, self._wait_for_tools, self._config = actor_class, wait_for_tools, config

    def options(self, **options: Any) -> RunnerActor:
        """As of an actor class."""
        return RunnerActor(self._actor_class.options(**options), self._wait_for_tools, self._config)

    def remote(self) -> Any:
        """As of an actor class; it starts while the tool server does. Raises ResourcesError."""
        from verl_tool.trainer.preflight.ray_resources import wait_for_resources, wait_until_started

        signal.signal(signal.SIGTERM, _interrupt)
        wait_for_resources(self._config)
        _choose_attention(self._config, cluster_joined=True)  # of the nodes that train
        actor = self._actor_class.remote()
        self._wait_for_tools()
        wait_until_started(actor, self._config)
        return actor


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


def _choose_tool_server(config: DictConfig) -> None:
    requested, agent = config.tool_server, config.actor_rollout_ref.agent
    if requested.start is None:
        if options_in(config).enable_agent and options_in(config).tool_server_url is None:
            raise ConfigError(
                "no tool server: set tool_server.start=python_code to start one (empty for tools of MCP servers alone, "
                "with tool_server.args=[--mcp,servers.json]), "
                "actor_rollout_ref.agent.tool_server_url=http://127.0.0.1:5000 to use a running one, "
                "or actor_rollout_ref.agent.enable_agent=false"
            )
        return
    provided = agent.tool_server_url or agent.tool_config.server_url
    if provided is not None:
        raise ConfigError(
            f"tool_server.start={requested.start!r} starts one, tool_server_url={provided!r} names one; give just one"
        )
    requested.port = requested.port or free_ports(1)[0]
    agent.tool_server_url = f"http://127.0.0.1:{requested.port}"


def _check_cpu(config: DictConfig) -> None:
    from verl_tool.platforms import cpu

    cpu.require()
    if config.actor_rollout_ref.actor.strategy not in ("fsdp", "fsdp2"):
        raise ConfigError(
            f"trainer.device=cpu with actor.strategy={config.actor_rollout_ref.actor.strategy!r}; "
            "only fsdp and fsdp2 run without an accelerator: add platform=cpu"
        )


def _choose_attention(config: DictConfig, *, cluster_joined: bool = False) -> None:
    """`choose_attention` by what is known of the model so far, and by the packages of the nodes that train: those of a
    cluster are known once it is joined. Raises ConfigError."""
    from verl_tool.agent_loop.verl.model_config import model_type
    from verl_tool.platforms.attention import choose_attention, import_problem
    from verl_tool.trainer.preflight.parallelism import has_critic
    from verl_tool.trainer.preflight.ray_resources import import_problem_of_nodes
    from verl_tool.trainer.preflight.resources import joins_cluster

    find_problem, of_cluster = import_problem, config.trainer.device != "cpu" and joins_cluster(config)
    if of_cluster != cluster_joined:
        return
    if of_cluster:

        def find_problem(module: str) -> str | None:
            return import_problem_of_nodes(module, config)

    model = config.actor_rollout_ref.model
    path, trusted = model.get("hf_config_path") or model.path, bool(model.get("trust_remote_code", False))
    kind = model_type(path, trust_remote_code=trusted)
    choose_attention(config, kind, critic=has_critic(config), find_problem=find_problem)


def _check_lengths(config: DictConfig, options: EpisodeOptions) -> None:
    rollout = config.actor_rollout_ref.rollout
    response, validation = options.max_response_length, options.of_validation().max_response_length
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


def set_aside(path: Path) -> None:
    """Keep the file of an earlier start as ``metrics.1.jsonl``, ``metrics.2.jsonl`` …: verl writes its log anew."""
    if path.exists():
        earlier = len(list(path.parent.glob(f"{path.stem}.*{path.suffix}")))
        path.rename(path.with_suffix(f".{earlier + 1}{path.suffix}"))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
