"""What a training run left behind, as settings of the service: ``--from_run outputs/<recipe>/<run>``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eval_service.model.checkpoint import newest_checkpoint
from eval_service.settings import Sampling
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.verl.config import context_tokens, options_in
from verl_tool.agent_loop.verl.tool_descriptions import tools_in
from verl_tool.errors import ConfigError
from verl_tool.protocol import ToolDescription

CONFIG_FILES = ("config.yaml", "config/config.yaml", ".hydra/config.yaml")
"""Where a run's config may be, seen from the run's folder: as the trainer resolved it, else as Hydra keeps it."""


@dataclass(frozen=True)
class TrainedRun:
    """What matters of a run for answering as it was trained."""

    name: str
    model: str
    """Folder of its newest weights."""
    checkpoint: str | None
    """Which these are, in words; None: the model was named."""
    options: EpisodeOptions
    """With the limits of its validation."""
    sampling: Sampling
    """That of the run's validation."""
    chat_template_kwargs: dict[str, Any]
    custom_chat_template: str | None
    """In place of the tokenizer's own."""
    engine_kwargs: dict[str, Any]
    """Further arguments of vLLM."""
    trust_remote_code: bool
    dtype: str
    max_model_len: int
    tensor_parallel: int
    tool_type: str | None
    """The tools that the run itself served; None if it used a server at `options.tool_server_url`."""
    tool_server_args: tuple[str, ...]
    tool_descriptions: tuple[ToolDescription, ...] | None
    """What it was told of the tools; none if its server told nothing; None if it did not ask."""


def read_run(folder: Path, model: str | None = None) -> TrainedRun:
    """Read a run's folder; `model` in place of its newest weights. Raises ConfigError that says what is missing."""
    config = run_config(folder)
    try:
        rollout = config.actor_rollout_ref.rollout
        checkpoint = newest_checkpoint(folder) if model is None else None
        return TrainedRun(
            name=folder.resolve().name,
            model=str(model if checkpoint is None else checkpoint.model),
            checkpoint=None if checkpoint is None else str(checkpoint),
            options=options_in(config).for_validation(),
            sampling=_sampling(rollout),
            chat_template_kwargs=_mapping(config.data.get("apply_chat_template_kwargs")),
            custom_chat_template=config.actor_rollout_ref.model.get("custom_chat_template"),
            engine_kwargs=_engine_kwargs(rollout),
            trust_remote_code=bool(config.actor_rollout_ref.model.get("trust_remote_code", False)),
            dtype=str(rollout.dtype),
            max_model_len=context_tokens(rollout),
            tensor_parallel=int(rollout.tensor_model_parallel_size),
            tool_type=config.tool_server.start,
            tool_server_args=tuple(str(arg) for arg in config.tool_server.args),
            tool_descriptions=None if config.tool_server.get("tools") is None else tools_in(config),
        )
    except OmegaConfBaseException as error:
        raise ConfigError(f"the config of the run {folder} cannot be read: {error}") from error


def run_config(folder: Path) -> DictConfig:
    """The whole config of a run, as the trainer had it; paths in a folder that was moved are where they are now.

    `folder` may be the config's own file, in which no path is changed. Raises ConfigError if there is none.
    """
    for path in (folder, *(folder / name for name in CONFIG_FILES)):
        if path.is_file():
            config = OmegaConf.load(path)
            if not isinstance(config, DictConfig):
                raise ConfigError(f"{path} holds no mapping; it is no config of a run")
            return config if path == folder else _moved(config, folder.resolve())
    raise ConfigError(f"no config in {folder} (looked for {', '.join(CONFIG_FILES)}); give the folder of one run")


def tokenizer_folder(folder: Path) -> str:
    """Where the tokenizer of a run is: its newest checkpoint, else the model with which it began."""
    try:
        return str(newest_checkpoint(folder).model)
    except ConfigError:
        began = folder / "model"
        return str(began if began.is_dir() else run_config(folder).actor_rollout_ref.model.path)


def _moved(config: DictConfig, folder: Path) -> DictConfig:
    """`config` with `folder` wherever it names the run's own."""
    before = Path(str(OmegaConf.select(config, "run_dir") or "."))
    if not before.is_absolute() or before == folder:
        return config
    moved = OmegaConf.create(_replaced(OmegaConf.to_container(config, resolve=False), str(before), str(folder)))
    assert isinstance(moved, DictConfig)  # as `config`
    moved.run_dir = str(folder)
    return moved


def _replaced(value: Any, before: str, now: str) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, before, now) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, before, now) for item in value]
    return value.replace(before, now) if isinstance(value, str) else value


def _sampling(rollout: DictConfig) -> Sampling:
    """How the run's validation drew tokens. verl's agent loop regards these three, and not ``do_sample``."""
    drawn = rollout.val_kwargs
    return Sampling(
        temperature=float(drawn.temperature),
        top_p=float(drawn.top_p),
        top_k=int(drawn.top_k),
        ignore_eos=bool(rollout.get("ignore_eos", False)),
    )


def _engine_kwargs(rollout: DictConfig) -> dict[str, Any]:
    """What the run gave vLLM by its own names; verl leaves out those that are null."""
    written = _mapping(rollout.get("engine_kwargs")).get("vllm") or {}
    return {name: value for name, value in written.items() if value is not None}


def _mapping(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    content = OmegaConf.to_container(value, resolve=True)
    return {str(key): item for key, item in content.items()} if isinstance(content, dict) else {}
