"""``python -m verl_tool.trainer.main_ppo``: train a model that acts through tools.

The config is verl's own `ppo_trainer` with three groups added; see `config/agent_ppo_trainer.yaml`. On a machine
without an accelerator, add ``platform=cpu``.

What imports verl is imported where it is used, so that the others start meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hydra
import ray
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayError, RayTaskError
from rich.console import Console

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.verl.model_config import is_hub_name
from verl_tool.checks.row_files import RowFile
from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.platforms.preload.template import template
from verl_tool.servers.serve.local_ray import address_to_join
from verl_tool.trainer.composition import known_names
from verl_tool.trainer.config_completion import check_with_verl, complete
from verl_tool.trainer.data_check import check_data, check_local_rows
from verl_tool.trainer.monitoring.failure import cause_of, disk_full_message, innermost
from verl_tool.trainer.monitoring.time_by_phase import phase_table
from verl_tool.trainer.preflight.patch_check import check_versions, imports_checked
from verl_tool.trainer.preflight.running_services import check_reward_servers, check_tool_server
from verl_tool.trainer.progress.console import loud_console, quiet_console
from verl_tool.trainer.progress.progress import STARTED
from verl_tool.trainer.progress.progress_bars import ProgressBars, display_for
from verl_tool.trainer.ray_launch import RunnerActor, interrupt, run_in_ray
from verl_tool.trainer.ray_settings import ray_settings
from verl_tool.trainer.recipe import make_inputs, make_tool_data, report, tool_data_to_make
from verl_tool.trainer.run_folder.disk_full import is_disk_full
from verl_tool.trainer.run_folder.earlier_starts import archive_earlier_start
from verl_tool.trainer.run_folder.run_lock import run_lock
from verl_tool.trainer.run_folder.saved_config import save_config
from verl_tool.trainer.tool_prompts import attach_tool_descriptions
from verl_tool.trainer.training_server import tool_server
from verl_tool.util.hub import go_offline_without_hub

log = logging.getLogger(__name__)

LOG = "main_ppo.log"
DRY_RUN_WIDTH = 132
"""Columns of the table of memory where nothing says how many there are."""
_MODELS = tuple(
    f"{role}.model.{name}" for role in ("actor_rollout_ref", "critic") for name in ("path", "tokenizer_path")
)
"""Settings that may name a model of a hub."""


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
    signal.signal(signal.SIGTERM, interrupt)
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
        options = prepare(config, console)
        with tool_server(config, console) as wait_until_up, patched_modules(config) as wait_for_imports:
            check_versions()
            prepare_inputs(config, console)
            files = check_data(config)

            def prepare_tools() -> None:
                wait_for_imports()
                served = options.model_copy(update={"tool_server_url": wait_until_up() or options.tool_server_url})
                attach_tool_descriptions(config, served, files)
                run_preflight_checks(config, served, files, server_is_up=True)
                take_over_folder(config, console)

            train(config, options, console, prepare_tools)


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


def dry_run(config: DictConfig) -> None:
    """Print the config, and look for all that a training with it would refuse; write and start nothing.

    Files and a model that are not there yet are told of only: recipes make them. Raises ConfigError.
    """
    from verl_tool.trainer.config_validation import check_parts, missing_files, missing_model

    with patched_modules(config) as wait_for_imports:  # which takes longest
        options = complete(config)
        print(OmegaConf.to_yaml(config, resolve=True), flush=True)
        for problem in (*missing_files(config), *missing_model(config)):
            print(f"not there yet: {problem}", file=sys.stderr)
        folder = tool_data_to_make(config)
        if folder is not None:
            print(
                f"not there yet: recipe.tool_data: the recipe makes {folder} for its tools, then they are checked",
                file=sys.stderr,
            )
        preflight = check_parts(config, options, tool_data_is_there=folder is None)
        for warning in preflight.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if preflight.memory is not None:
            Console(stderr=True, width=None if sys.stderr.isatty() else DRY_RUN_WIDTH).print(preflight.memory)
        check_versions()
        wait_for_imports()
    if folder is not None:
        return
    run_preflight_checks(config, options, check_local_rows(config), server_is_up=False)


def run_preflight_checks(
    config: DictConfig, options: EpisodeOptions, files: Sequence[RowFile], *, server_is_up: bool
) -> None:
    """The doctor's checks. Raises ConfigError."""
    from verl_tool.trainer.preflight_checks import check_setup

    check_setup(config, options, files, server_is_up=server_is_up)


def prepare(config: DictConfig, console: Console) -> EpisodeOptions:
    """`complete` the config, and make what its tools read; return the loop's options. Raises ConfigError or RecipeError
    before anything starts."""
    from verl_tool.trainer.config_validation import check_parts
    from verl_tool.trainer.resume_check import check_same_run

    options = complete(config)
    make_tool_data(config, console)
    for warning in check_parts(config, options).warnings:
        log.warning("%s", warning)
    check_same_run(config)
    check_tool_server(config, options)
    check_reward_servers(config)
    return options


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
    """`make_inputs`, whose time is told by itself and is no part of the training's set-up. Raises RecipeError, or
    ConfigError if verl refuses the critic's model."""
    began = time.time()
    if not make_inputs(config, console):
        return
    seconds = time.time() - began
    check_with_verl(config)
    console.print(f"data and model made in {seconds:.1f} s", highlight=False)
    os.environ[STARTED] = str(float(os.environ[STARTED]) + seconds)
    config.ray_kwargs.ray_init.runtime_env.env_vars[STARTED] = os.environ[STARTED]


def preloaded(config: DictConfig) -> contextlib.AbstractContextManager[None]:
    """Within the block, processes are forked from one that has its imports done, if the config says so."""
    if not config.preload or address_to_join(config.ray_kwargs.ray_init.get("address")) is not None:
        return contextlib.nullcontext()  # the processes of a cluster are its raylets'
    return template(OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars))  # type: ignore[arg-type]


def patched_modules(config: DictConfig) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """`imports_checked`, unless the processes that this one forks from import the same."""
    forks = config.preload and address_to_join(config.ray_kwargs.ray_init.get("address")) is None
    return contextlib.nullcontext(lambda: None) if forks else imports_checked()


def train(config: DictConfig, options: EpisodeOptions, console: Console, wait_for_tools: Callable[[], None]) -> None:
    """Train to the end and tell where the time went. Leaves no Ray of ours behind.

    `wait_for_tools` returns when the tool server is up and has told its tools, which Ray's start does not wait for.
    """
    from verl_tool.trainer.task_runner import AgentTaskRunner, AgentTaskRunnerV1

    runner = AgentTaskRunnerV1 if config.trainer.use_v1 else AgentTaskRunner
    local = not ray.is_initialized()
    visible = ProgressBars(display_for(console)) if options.enable_tqdm else contextlib.nullcontext()
    try:
        with visible, ray_settings(config):
            run_in_ray(config, RunnerActor(ray.remote(num_cpus=1)(runner), wait_for_tools, config))
    finally:
        if local:
            ray.shutdown()
    run = Path(config.run_dir)
    if (run / "metrics.jsonl").exists():
        console.print(phase_table(run))


def set_aside(path: Path) -> None:
    """Keep the file of an earlier start as ``metrics.1.jsonl``, ``metrics.2.jsonl`` …: verl writes its log anew."""
    if path.exists():
        earlier = len(list(path.parent.glob(f"{path.stem}.*{path.suffix}")))
        path.rename(path.with_suffix(f".{earlier + 1}{path.suffix}"))


if __name__ == "__main__":
    main()
