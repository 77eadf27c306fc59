"""What the command is given, as the checks want it: from flags, and from the config of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import AutoConfig

from eval_service.model.run_config import run_config
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tool_channel import Tools
from verl_tool.agent_loop.verl.config import options_in
from verl_tool.agent_loop.verl.tool_descriptions import ask_for_tools, serves_mcp, tools_in
from verl_tool.checks.row_files import SUFFIXES, RowFile, file_names
from verl_tool.checks.setup import MADE_UP_TOOL, Row
from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.gateway.settings import GatewaySettings
from verl_tool.protocol import ToolDescription
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tool_config import ToolConfig
from verl_tool.servers.tools import load_tools

ROWS = 200
"""So many of each file are looked at, the first ones."""
CALL_SECONDS = 60.0
"""For one call of a tool in this process."""


@dataclass(frozen=True)
class OfConfig:
    options: EpisodeOptions
    model: str
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any]
    trust_remote_code: bool
    data: tuple[RowFile, ...]
    prompt_key: str
    drops_overlong: bool
    reward_manager: str
    reward_options: Mapping[str, Any]
    tool_type: str | None
    """Tools that can be made in this process; None: the run used a server, or tools of MCP servers too."""
    tool_descriptions: tuple[ToolDescription, ...]
    gateway: GatewaySettings | None
    """Of a run of an agent program."""


def read_config(path: Path) -> OfConfig:
    """Of a run's folder, or of a config as a run leaves it there. Raises ConfigError."""
    config = run_config(path)
    try:
        model, data, reward = config.actor_rollout_ref.model, config.data, config.reward
        manager, names = reward.reward_manager, file_names(data.train_files) + file_names(data.val_files)
        return OfConfig(
            options=options_in(config),
            model=str(model.path),
            chat_template=model.get("custom_chat_template"),
            chat_template_kwargs=OmegaConf.to_container(data.get("apply_chat_template_kwargs") or OmegaConf.create({})),  # type: ignore[arg-type]
            trust_remote_code=bool(model.get("trust_remote_code", False)),
            data=tuple(RowFile(Path(name).expanduser()) for name in dict.fromkeys(names)),
            prompt_key=str(data.prompt_key),
            drops_overlong=bool(data.filter_overlong_prompts),
            reward_manager=str(manager.name if manager.source == "register" else manager.module.path),
            reward_options=OmegaConf.to_container(reward.get("reward_kwargs") or OmegaConf.create({})),  # type: ignore[arg-type]
            tool_type=None if serves_mcp(config) else config.tool_server.start,
            tool_descriptions=tools_in(config),
            gateway=GatewaySettings.of_config(config) if GatewaySettings.is_set(config) else None,
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no config of a training as a run leaves it (config.yaml): {error}. A recipe's own file is only "
            "a part of one; DRY_RUN=1 bash train.sh looks at that with the same checks"
        ) from error


def rows_in(files: Sequence[RowFile], prompt_key: str) -> tuple[Row, ...]:
    """The first `ROWS` rows of each file. Raises ConfigError for one that is missing, empty, or of another kind."""
    rows = []
    for file in files:
        if not file.path.is_file():
            raise ConfigError(f"there is no file {file}; examples/data_preprocess/ makes such files")
        if not file.is_readable:
            raise ConfigError(f"{file} is of a kind that is not read; known: {', '.join(SUFFIXES)}")
        try:
            found = [Row(f"row {i} of {file}", row, prompt_key) for i, row in enumerate(file.first_rows(ROWS))]
        except (OSError, ValueError) as error:  # pyarrow's errors are both
            raise ConfigError(f"{file} cannot be read: {error}") from error
        if not found:
            raise ConfigError(f"{file} holds no rows; make the data again")
        rows += found
    return tuple(rows)


def context_length(model: str, trust_remote_code: bool) -> int | None:
    """Tokens that a model has positions for; None if its folder has no config that tells."""
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).get_text_config()
    except (OSError, ValueError):
        return None
    maximum = getattr(config, "max_position_embeddings", None)
    return maximum if isinstance(maximum, int) else None


@dataclass(frozen=True)
class ToolSource:
    """Tools in this process, on a server, or none."""

    tool_type: str | None = None
    tool_config: str | None = None
    options: EpisodeOptions = field(default_factory=lambda: EpisodeOptions(enable_agent=False))
    """Name the server, if the tools are on one."""
    known: tuple[ToolDescription, ...] = ()
    """What a run was told of tools on a server that is not asked again; a stand-in answers for them."""
    api_key: str | None = None

    def described(self) -> tuple[ToolDescription, ...]:
        """What they are. Raises ConfigError if they cannot be made, or the server does not answer."""
        if self.tool_type is not None:
            return tuple(tool.describe() for tool in load_tools(self.tool_type, self._config()))
        if self.known or self.options.tool_server_url is None:
            return self.known or (MADE_UP_TOOL,)
        try:
            return tuple(ask_for_tools(self.options, self.api_key))
        except ToolFault as fault:
            raise ConfigError(
                f"the tool server at {self.options.tool_server_url} does not tell its tools: {fault.message}; start "
                "it, or give --tool_type for tools in this process"
            ) from fault

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Tools | None]:
        """The tools, for as long as the block runs; None if there are none. Raises VerlToolError if one cannot run."""
        if self.tool_type is not None:
            loaded = load_tools(self.tool_type, self._config(), {"workers": 1})
            async with InProcessTools(loaded, CALL_SECONDS) as tools:
                yield tools
        elif self.options.tool_server_url is not None and not self.known:
            url = self.options.tool_server_url
            async with ToolClient(url, api_key=self.api_key, **self.options.client_settings()) as client:  # type: ignore[arg-type]
                yield client
        else:
            yield None

    def _config(self) -> ToolConfig | None:
        return ToolConfig.from_cli(self.tool_config) if self.tool_config is not None else None


def api_key() -> str | None:
    """That of the tool server, from the variable that servers read."""
    return os.environ.get("VERL_TOOL_API_KEY")
