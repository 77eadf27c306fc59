"""verl's agent loop for programs that nobody changes: one session, and one run of the program, for each sample.

    gateway.program.command='[python, agent.py, "{task}"]'

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap

from verl_tool.agent_loop.row import build_call_extra, is_present, listed_tools, text_messages
from verl_tool.agent_loop.trajectory import Excluded, StopReason, Trajectory
from verl_tool.agent_loop.verl.agent_loop import VerlToolAgentLoop
from verl_tool.content.packed_files import unpack
from verl_tool.errors import ConfigError, SandboxError
from verl_tool.gateway.agent_program import ROW_IMAGE, ProgramResult, run_program
from verl_tool.gateway.gateway_app import Gateway, GatewayOptions
from verl_tool.gateway.mcp_tools import GatewayTools
from verl_tool.gateway.session import AgentSession, SessionModel
from verl_tool.gateway.settings import GatewaySettings
from verl_tool.protocol import FILES_FIELD, Fault, FaultKind
from verl_tool.sandbox.sandboxed_service import ServiceSandbox
from verl_tool.servers.cluster.direct_server import DirectServer
from verl_tool.verification import verification_of

PROGRAM = "agent_program"
"""Of a record's ``extra``: how the program ended."""


class _AgentHost:
    """The gateway of a worker process, on a Unix socket, and the sandbox of its programs."""

    def __init__(self, model: SessionModel, settings: GatewaySettings, tools: GatewayTools | None) -> None:
        self.settings = settings
        self.gateway = Gateway(model, GatewayOptions(max_sessions=1 << 16, idle_seconds=math.inf), tools)
        self.sandbox = ServiceSandbox(settings.program.limits)
        self._folder = tempfile.TemporaryDirectory(prefix="verl_tool_gateway_")
        os.chmod(self._folder.name, 0o755)
        self.socket = Path(self._folder.name) / "gateway.sock"
        self._server: DirectServer | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen. Raises OSError if nobody can at this path, and what the sandbox raises."""
        async with self._starting:
            if self._server is not None:
                return
            if self.settings.program.image is None:
                await self.sandbox.start()
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(self.socket))
            # Programs are other users if we are root, and in containers.
            os.chmod(self.socket, 0o666 if os.geteuid() == 0 or self.settings.program.image else 0o600)
            listener.listen()
            server = DirectServer(listener)
            await server.open(self.gateway.app(for_agents=True))
            self._server = server


_hosts: weakref.WeakKeyDictionary[Any, _AgentHost] = weakref.WeakKeyDictionary()
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
        """Run the program for one sample. Raises ConfigError for a row without text, with files that cannot be
        unpacked, or with a verifier."""
        if self._worker.step is not None or self._worker.stored is not None:  # what an earlier run sampled
            again: dict[str, Any] = {
                "raw_prompt": raw_prompt,
                "priority": priority,
                "global_steps": global_steps,
                "index": index,
            }
            return await super().run(sampling_params, **again, **row)
        where = f"row {'?' if index is None else index} of the data"
        if verification_of(row.get("reward_model"), where) is not None:
            raise ConfigError(
                f"{where} has a verifier, which checks a tool's workspace; a program has none. Grade its files"
            )
        task = str(text_messages(raw_prompt, where)[-1]["content"])
        listed = listed_tools(tools_kwargs, row.get("extra_info"), where)
        extra = build_call_extra(tools_kwargs, listed, where)
        files = extra.get(FILES_FIELD)
        row_image = extra.pop(ROW_IMAGE, None)
        unpacked = {name: file.content for name, file in unpack(files).items()} if is_present(files) else {}
        host = self._host()
        await host.start()
        place = host.settings.program.choose_place(host.sandbox, row_image, where)
        options = host.settings.session
        sampling = {**sampling_params, **options.sampling}
        options = options.model_copy(update={"sampling": sampling})
        session = host.gateway.open_session(options, call_extra=extra, listed_tools=listed)
        generator = self._worker.generator
        generator.begin(session.id, int(priority), self._seed(row, index, int(global_steps), int(priority)))
        result: ProgramResult | str
        try:
            result = await run_program(place, host.settings.program, session, host.socket, task, unpacked)
        except SandboxError as error:
            result = str(error)
        finally:
            rollout = await session.finish()
            host.gateway.sessions.pop(session.id, None)
            use = generator.end(session.id)
        description = {"error": result} if isinstance(result, str) else asdict(result)
        record = replace(_with_fault(rollout, session, result), extra={**rollout.extra, PROGRAM: description})
        return await self._outputs(record, use, row, index, int(global_steps), self._worker.formats.all)

    def _host(self) -> _AgentHost:
        host = _hosts.get(self.server_manager)
        if host is None:
            worker, rollout = self._worker, self.config.actor_rollout_ref.rollout
            limit = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
            end_token_ids = worker.prompts.observations().end_token_ids
            model = SessionModel.create(
                *(worker.generator, worker.tokenizer, worker.formats.all, int(limit)),
                end_token_ids=end_token_ids,
                images=worker.placer,
                max_images=rollout.get("limit_images"),
            )
            settings = GatewaySettings.of_config(self.config)
            tools = None
            if settings.program.mcp and worker.tools is not None:
                tools = GatewayTools(worker.tools, worker.options, reads_images=worker.placer is not None)
            host = _hosts[self.server_manager] = _AgentHost(model, settings, tools)
        return host


def _with_fault(rollout: Trajectory, session: AgentSession, result: ProgramResult | str) -> Trajectory:
    """`rollout`, left out of the loss if infrastructure failed: the engine, the sandbox, or a program that never called
    the model. How a program ends after that may be the model's doing, and is graded."""
    if session.aborted:
        return replace(rollout, stop=StopReason.ABORTED, excluded=Excluded.ABORTED)
    words = session.engine_failure
    if words is None and not session.num_requests:
        if isinstance(result, str):
            words = result
        else:
            end = "was killed at its time limit" if result.exit_code is None else f"exited with {result.exit_code}"
            words = f"the agent program {end} without a request to the model; it printed: {result.output[-500:]}"
    if words is None:
        return rollout
    fault = Fault(kind=FaultKind.MISCONFIGURED, message=words, retryable=False)
    return replace(rollout, stop=StopReason.FAULT, fault=fault, excluded=Excluded.FAULT)
