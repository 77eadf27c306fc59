"""verl's agent loop for programs that nobody changes: one session, and one run of the program, for each sample.

    gateway.program.command='[python, agent.py, "{task}"]'

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap

from verl_tool.agent_loop.row import build_call_extra, listed_tools
from verl_tool.agent_loop.verl.agent_loop import VerlToolAgentLoop
from verl_tool.agent_loop.verl.config import context_tokens
from verl_tool.gateway.agent_host import AgentHost, AgentTask, finish_session
from verl_tool.gateway.gateway_app import Gateway, GatewayOptions
from verl_tool.gateway.mcp_tools import GatewayTools
from verl_tool.gateway.session import SessionModel
from verl_tool.gateway.settings import GatewaySettings
from verl_tool.protocol import ENVIRONMENT_FIELD, WORKSPACE_IMAGE_FIELD, WORKSPACE_LIMITS_FIELD
from verl_tool.verification import verification_of


class _Host:
    """The gateway of a worker process, and its agent programs."""

    def __init__(
        self, model: SessionModel, settings: GatewaySettings, maximum: int | None, tools: GatewayTools | None
    ) -> None:
        """maximum: of programs that run at a time."""
        self.slots = contextlib.nullcontext() if maximum is None else asyncio.Semaphore(maximum)
        self.session_options = settings.session
        self.gateway = Gateway(model, GatewayOptions(max_sessions=1 << 16, idle_seconds=math.inf), tools)
        self.agents = AgentHost(self.gateway.app(for_agents=True), settings.program)


_hosts: weakref.WeakKeyDictionary[Any, _Host] = weakref.WeakKeyDictionary()
"""By the engine client, of which verl makes one a worker process."""


def make_agent_loop(trainer_config: DictConfigWrap, **others: Any) -> VerlToolAgentLoop:
    """The loop that a config asks for: a program's, if it has ``gateway.program``."""
    loop = GatewayAgentLoop if GatewaySettings.is_set(trainer_config.config) else VerlToolAgentLoop
    return loop(trainer_config, **others)


class GatewayAgentLoop(VerlToolAgentLoop):
    """One row of the data set, answered by an agent program."""

    async def run(
        self,
        sampling_params: dict[str, Any],
        *,
        raw_prompt: list[dict[str, Any]],
        tools_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        global_steps: int = 0,
        index: int | None = None,
        **row: Any,
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run the program for one sample. Raises ConfigError for a row without text, or with files that
        cannot be unpacked."""
        if self._worker.step is not None or self._worker.stored is not None:  # what an earlier run sampled
            again: dict[str, Any] = {
                "raw_prompt": raw_prompt,
                "priority": priority,
                "global_steps": global_steps,
                "index": index,
            }
            return await super().run(sampling_params, **again, **row)
        where = f"row {'?' if index is None else index} of the data"
        listed = listed_tools(tools_kwargs, row.get("extra_info"), where)
        extra = build_call_extra(tools_kwargs, listed, where)
        verification = verification_of(row.get("reward_model"), where, in_environment=ENVIRONMENT_FIELD in extra)
        host = self._host()
        task = AgentTask.of_row(raw_prompt, extra, verification, where, judges=host.agents.program.judges)
        for name in (ENVIRONMENT_FIELD, WORKSPACE_IMAGE_FIELD, WORKSPACE_LIMITS_FIELD):  # not of the tools over MCP
            extra.pop(name, None)
        await host.agents.start()
        async with host.slots:
            sampling = {**sampling_params, **host.session_options.sampling}
            options = host.session_options.model_copy(update={"sampling": sampling})
            session = host.gateway.open_session(options, call_extra=extra, listed_tools=listed)
            generator = self._worker.generator
            generator.begin(session.id, int(priority), self._seed(row, index, int(global_steps), int(priority)))
            try:
                record = await host.agents.run(session, task, partial(finish_session, session))
            finally:
                host.gateway.sessions.pop(session.id, None)
                use = generator.end(session.id)
        return await self._outputs(record, use, row, index, int(global_steps), self._worker.formats.all)

    def _host(self) -> _Host:
        host = _hosts.get(self.server_manager)
        if host is None:
            worker, rollout = self._worker, self.config.actor_rollout_ref.rollout
            end_token_ids = worker.prompts.observations().end_token_ids
            model = SessionModel.create(
                *(worker.generator, worker.tokenizer, worker.formats.all, context_tokens(rollout)),
                end_token_ids=end_token_ids,
                images=worker.placer,
                max_images=rollout.get("limit_images"),
            )
            settings = GatewaySettings.of_config(self.config)
            tools = None
            if settings.program.mcp and worker.tools is not None:
                tools = GatewayTools(worker.tools, worker.options, reads_images=worker.placer is not None)
            maximum = worker.options.max_concurrent_trajectories
            host = _hosts[self.server_manager] = _Host(model, settings, maximum, tools)
        return host
