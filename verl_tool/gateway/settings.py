"""The group ``gateway`` of a trainer's config."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, ValidationError

from verl_tool.agent_loop.verl.config import context_tokens, options_in
from verl_tool.errors import ConfigError
from verl_tool.gateway.agent_program import AgentProgram
from verl_tool.gateway.session import SessionOptions
from verl_tool.servers.mcp.catalog import require_sdk


class GatewaySettings(BaseModel):
    """The group ``gateway`` of a trainer's config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    program: AgentProgram
    session: SessionOptions = SessionOptions()

    @classmethod
    def of_config(cls, config: DictConfig) -> GatewaySettings:
        """Read them. Raises ConfigError that names the option, for the older trainer, and for an agent that is not
        installed."""
        group = config.get("gateway")
        settings = cls.parse(OmegaConf.to_container(group, resolve=True) if group is not None else {})
        if not config.trainer.use_v1:
            raise ConfigError("gateway.program makes several rows per rollout; set trainer.use_v1=true")
        if settings.program.mcp:
            if not options_in(config).enable_agent:
                raise ConfigError("gateway.program.mcp calls the tool server; set actor_rollout_ref.agent.enable_agent")
            require_sdk("gateway.program.mcp")
        return settings.in_context(context_tokens(config.actor_rollout_ref.rollout))

    def in_context(self, tokens: int) -> GatewaySettings:
        """With the model's context told to the program, unless its own settings name one."""
        program = self.program.model_copy(update={"context_tokens": self.program.context_tokens or tokens})
        return self.model_copy(update={"program": program})

    @classmethod
    def parse(cls, group: Any) -> GatewaySettings:
        """Read them. Raises ConfigError as `of_config`."""
        try:
            settings = cls.model_validate(group)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(["gateway", *map(str, problem["loc"])])
            raise ConfigError(f"{where}: {problem['msg']}") from None
        return settings.model_copy(update={"program": settings.program.resolve()})

    @staticmethod
    def is_set(config: DictConfig) -> bool:
        """Whether a config asks for a program."""
        program = OmegaConf.select(config, "gateway.program")
        return bool(program and any(program.get(name) for name in ("command", "python", "preset")))
