"""``python -m eval_service.app``: serve a model with tools, as an OpenAI API.

python -m eval_service.app --model MODEL --tool_type python_code --action_stop_tokens '</python>'
python -m eval_service.app --from_run outputs/calculator/grpo
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from pydantic import ValidationError
from rich.markup import escape

from eval_service.deployment import APP_NAME, CLOSE_SECONDS, DEPLOYMENT, application
from eval_service.episode_flags import merged_options, set_options, with_episode_flags
from eval_service.model.run_config import TrainedRun, read_run
from eval_service.settings import CompletionsSettings, Sampling, ServiceSettings, VllmSettings
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.content.parts import LIMITS
from verl_tool.errors import ConfigError, StartError, VerlToolError
from verl_tool.http import command_options
from verl_tool.http.supervised_server import SupervisedServer, serve_command
from verl_tool.servers.serve.ports import free_ports
from verl_tool.servers.serve.running_server import Signals
from verl_tool.servers.serve.serve_cluster import ServeCluster
from verl_tool.servers.server_console import console, print_address
from verl_tool.servers.settings import new_server_name
from verl_tool.util.command_line import run_command
from verl_tool.util.json_text import BadJsonError, decode_json

START_SECONDS = 1800.0
QUOTED_CHARACTERS = 2000
"""The end of a replica's last words."""
TOOL_SERVER_LOG = Path("outputs/eval_service/tool_server.log")


@dataclass(frozen=True)
class Start:
    settings: ServiceSettings
    host: str
    port: int
    num_models: int
    ray_address: str | None
    tool_type: str | None
    """Tools of the server to start with the service; None: there is one, or none is needed."""
    tool_server_args: tuple[str, ...] = ()


def serve_model(start: Start) -> None:
    """Serve until told to stop. Raises VerlToolError."""
    signals = Signals()
    cluster = ServeCluster(
        host=start.host,
        port=start.port,
        ray_address=start.ray_address,
        logical_cpus=max(os.cpu_count() or 1, start.num_models + 1),
        app_name=APP_NAME,
        deployment=DEPLOYMENT,
        # A model may fail to load for reasons that take a traceback to tell.
        quote=lambda words: words[-QUOTED_CHARACTERS:],
    )
    with _tool_server(start) as settings, cluster:
        signals.install()
        on_gpus = ray.cluster_resources().get("GPU", 0) > 0
        server = new_server_name(APP_NAME)
        app = application(settings, start.num_models, on_gpus=on_gpus, server=server)
        cluster.serve_application(app, START_SECONDS)
        # An unwell tool server shows in the status; the endpoint serves all the same.
        cluster.wait_until_it_answers(lambda status, body: _is_health_of(server, body))
        _print_summary(cluster, settings, start)
        _watch(cluster, signals)
        console.print("stopping: what runs is answered first; once more Ctrl-C: at once")
        cluster.drain(settings.drain_seconds + CLOSE_SECONDS)
    console.print("stopped")


@with_episode_flags
def command(
    model: Annotated[str | None, typer.Option("--model", help="Folder or hub name of the model.")] = None,
    from_run: Annotated[
        Path | None,
        typer.Option("--from_run", help="Folder of a training run: its newest weights, loop, sampling and tools."),
    ] = None,
    tool_type: Annotated[
        str | None, typer.Option("--tool_type", help="Start a tool server with these tools, separated by commas.")
    ] = None,
    tool_config: Annotated[
        str | None, typer.Option("--tool_config", help="With --tool_type: JSON of the tool server, or its file.")
    ] = None,
    mcp: Annotated[
        Path | None, typer.Option("--mcp", help="JSON file of MCP servers, whose tools the tool server serves too.")
    ] = None,
    host: command_options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    num_models: Annotated[int, typer.Option("--num_models", min=1, help="Replicas of the model.")] = 1,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor_parallel_size", min=1, help="GPUs of one replica.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="As vLLM's.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option("--max_num_seqs", min=1, help="As vLLM's.")] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option("--gpu_memory_utilization", min=0.01, max=1.0, help="As vLLM's.")
    ] = 0.9,
    enforce_eager: Annotated[bool, typer.Option("--enforce_eager", help="As vLLM's.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust_remote_code", help="Run code in the model's folder.")] = (
        False
    ),
    engine_url: Annotated[
        str | None,
        typer.Option("--engine_url", help="Use this server's /v1/completions (token ids both ways) and load no model."),
    ] = None,
    engine_model: Annotated[
        str | None, typer.Option("--engine_model", help="The model's name at --engine_url; default: its only one.")
    ] = None,
    engine_api_key: Annotated[
        str | None,
        typer.Option("--engine_api_key", envvar="VERL_TOOL_ENGINE_API_KEY", show_envvar=True, help="Its bearer token."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served_model_name", help="What clients call the model; default: its folder's name.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="Default: the model's.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0.0, help="If a request says none; default: the run's, or 1."),
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top_p", min=0.0, max=1.0, help="The same.")] = None,
    top_k: Annotated[int | None, typer.Option("--top_k", min=-1, help="The same.")] = None,
    api_key: Annotated[str | None, command_options.api_key_option("VERL_TOOL_EVAL_API_KEY")] = None,
    tool_server_api_key: Annotated[
        str | None,
        typer.Option("--tool_server_api_key", envvar="VERL_TOOL_API_KEY", show_envvar=True, help="The tool server's."),
    ] = None,
    max_queued: Annotated[
        int, typer.Option("--max_queued", min=1, help="Answers that wait in one replica before it refuses with 503.")
    ] = 8192,
    max_images: Annotated[int, typer.Option("--max_images", min=1, help="Most images of one request.")] = LIMITS.media,
    allow_image_urls: Annotated[
        bool, typer.Option("--allow_image_urls", help="Fetch images of http addresses, public ones only.")
    ] = False,
    request_timeout: Annotated[
        float, typer.Option("--request_timeout", min=1.0, help="Seconds after which a request is stopped.")
    ] = 3600.0,
    drain_seconds: Annotated[
        float, typer.Option("--drain_seconds", min=0.1, help="The longest that stopping waits for running answers.")
    ] = 60.0,
    allowed_hosts: command_options.AllowedHosts = "",
    ray_address: command_options.RayAddress = None,
    log_level: command_options.ReplicasLogLevel = command_options.LogLevel.INFO,
    **episode: Any,
) -> None:
    """Serve a model with its tools as an OpenAI API: what was trained is what answers."""
    try:
        run = read_run(from_run, model) if from_run is not None else None
        flags = set_options(episode)
        options = merged_options(run.options if run else None, flags)
        engine: VllmSettings | CompletionsSettings
        if engine_url is not None:
            engine = CompletionsSettings(
                url=engine_url, model=engine_model, api_key=engine_api_key, max_model_len=options.max_model_len
            )
        else:
            engine = VllmSettings(
                tensor_parallel=tensor_parallel_size or (run.tensor_parallel if run else 1),
                dtype=dtype or (run.dtype if run else "auto"),
                max_model_len=options.max_model_len or (run.max_model_len if run else None),
                gpu_memory_utilization=gpu_memory_utilization,
                max_num_seqs=max_num_seqs,
                enforce_eager=enforce_eager,
                engine_kwargs=run.engine_kwargs if run else {},
            )
        settings = ServiceSettings(
            model=_model(model, run, tokenizer, engine),
            served_model_name=served_model_name or _name(model, run, engine),
            checkpoint=run.checkpoint if run else None,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code or bool(run and run.trust_remote_code),
            chat_template_kwargs=run.chat_template_kwargs if run else {},
            chat_template=run.custom_chat_template if run else None,
            engine=engine,
            options=options,
            # Tools that are served in place of the run's, or beside them, are told as they are.
            tool_descriptions=run.tool_descriptions if run and tool_type is None and mcp is None else None,
            sampling=_sampling(run.sampling if run else Sampling(), temperature, top_p, top_k),
            tool_api_key=tool_server_api_key,
            api_key=api_key,
            max_queued=max_queued,
            max_images=max_images,
            allow_image_urls=allow_image_urls,
            request_timeout_seconds=request_timeout,
            drain_seconds=drain_seconds,
            listen_host=host,
            listen_port=port,
            allowed_hosts=command_options.host_names(allowed_hosts),
            log_level=log_level.value,
        )
        tools = _tools_to_start(options, tool_type, mcp, run, "tool_server_url" in flags)
        serve_model(
            Start(settings, host, port, num_models, ray_address, tools, _tool_args(tool_type, tool_config, mcp, run))
        )
    except (VerlToolError, ValidationError) as error:
        console.print(f"[bold red]cannot serve:[/bold red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2 if isinstance(error, (ConfigError, ValidationError)) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _model(
    model: str | None, run: TrainedRun | None, tokenizer: str | None, engine: VllmSettings | CompletionsSettings
) -> str:
    """Where model and tokenizer are read from. A model that another server holds needs a tokenizer only."""
    if run is not None:
        return run.model
    found = model or (tokenizer if isinstance(engine, CompletionsSettings) else None)
    if found is None:
        raise ConfigError("no model: give --model, --from_run, or --engine_url with --tokenizer")
    return found


def _name(model: str | None, run: TrainedRun | None, engine: VllmSettings | CompletionsSettings) -> str:
    if model is None and run is not None:
        return run.name
    if model is None and isinstance(engine, CompletionsSettings) and engine.model is not None:
        return engine.model
    # A hub name stays as it is; a folder gives its last part.
    return Path(model).resolve().name if model and Path(model).is_dir() else model or "model"


def _sampling(base: Sampling, temperature: float | None, top_p: float | None, top_k: int | None) -> Sampling:
    flags = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    return base.model_copy(update={name: value for name, value in flags.items() if value is not None})


def _tools_to_start(
    options: EpisodeOptions, tool_type: str | None, mcp: Path | None, run: TrainedRun | None, has_url: bool
) -> str | None:
    """The tools to serve, if a server is to be started; empty: those of `mcp` alone. Raises ConfigError if the loop
    needs one and has none."""
    if (tool_type is not None or mcp is not None) and has_url:
        name = "--mcp" if tool_type is None else "--tool_type"
        raise ConfigError(f"{name} starts a tool server and --tool_server_url names one; give just one of them")
    if tool_type is not None:
        return tool_type
    if run is not None and run.tool_type is not None and not has_url:
        return run.tool_type
    if mcp is not None:
        return ""
    if options.enable_agent and options.tool_server_url is None:
        raise ConfigError(
            "no tool server: give --tool_type to start one, --tool_server_url to use one, or --no_enable_agent"
        )
    return None


def _tool_args(
    tool_type: str | None, tool_config: str | None, mcp: Path | None, run: TrainedRun | None
) -> tuple[str, ...]:
    """Further options of the tool server: the run's, if its tools are served, and the config files."""
    own = run.tool_server_args if run is not None and tool_type is None else ()
    files = {"--tool_config": tool_config, "--mcp": mcp}
    return (*own, *(part for name, value in files.items() if value is not None for part in (name, str(value))))


@contextlib.contextmanager
def _tool_server(start: Start) -> Iterator[ServiceSettings]:
    """The tool server, for as long as the block runs; the settings with its address."""
    settings = start.settings
    if start.tool_type is None:
        yield settings
        return
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    if settings.tool_api_key is not None:
        os.environ["VERL_TOOL_API_KEY"] = settings.tool_api_key
    tool_command = serve_command(start.tool_type, port, start.tool_server_args)
    options = EpisodeOptions.load(
        {name: getattr(settings.options, name) for name in settings.options.model_fields_set} | {"tool_server_url": url}
    )
    with SupervisedServer(tool_command, url, TOOL_SERVER_LOG):
        served = start.tool_type or "of MCP servers"
        console.print(f"tools       {served} at {url}, log in {TOOL_SERVER_LOG}", highlight=False)
        yield settings.model_copy(update={"options": options})


def _is_health_of(server: str, body: bytes) -> bool:
    try:
        report = decode_json(body)
    except BadJsonError:
        return False
    return isinstance(report, dict) and report.get("server") == server


def _watch(cluster: ServeCluster, signals: Signals) -> None:
    """Return when told to stop. Raises StartError if the service is gone, or has no model for too long."""
    healthy_at = time.monotonic()
    last_state = "RUNNING"
    for _ in signals.looks():
        state = cluster.live_state()
        if state != last_state:
            console.print(f"the model is {state}: {cluster.replicas_words() or 'all its replicas serve'}", markup=False)
            last_state = state
        if state == "RUNNING":
            healthy_at = time.monotonic()
        elif time.monotonic() - healthy_at > START_SECONDS:
            raise StartError(f"the model did not come back in {START_SECONDS:g} s: {cluster.replicas_words()}")


def _print_summary(cluster: ServeCluster, settings: ServiceSettings, start: Start) -> None:
    engine = settings.engine
    what = f"vLLM, {start.num_models} replica(s)" if isinstance(engine, VllmSettings) else engine.url
    which = "" if settings.checkpoint is None else f"{settings.checkpoint}: "
    console.print(f"model       {settings.served_model_name} ({which}{settings.model}) on {what}", highlight=False)
    print_address(f"{cluster.url}/v1", cluster.host, settings.api_key)


if __name__ == "__main__":
    run_command(command)
