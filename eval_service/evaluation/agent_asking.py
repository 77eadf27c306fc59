"""Asks an endpoint through agent programs: each answer is one run of the program, as in training with
`verl_tool.gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from eval_service.evaluation.asking import Asker, Asking
from eval_service.evaluation.dataset import Problem
from eval_service.evaluation.record import Record
from eval_service.evaluation.session_relay import RemoteSession, SessionRelay
from eval_service.openai.usage import usage_of
from verl_tool.agent_loop.trajectory import Author, Excluded, Trajectory
from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.gateway.agent_host import AgentHost, AgentTask, FinishedSession
from verl_tool.gateway.gateway_app import SESSIONS_PATH
from verl_tool.gateway.settings import GatewaySettings
from verl_tool.util.json_text import encode_json

_ADMIN_SECONDS = 60.0
"""For opening and finishing a session."""
_MISCONFIGURED = (401, 404, 501)


class _EndpointError(VerlToolError):
    """The endpoint did not open or finish a session."""


class AgentAsker(Asker):
    """An endpoint that answers problems through the agent program of `settings`, which runs in this machine's sandbox.

    Programs reach `SessionRelay` and nothing else. The sessions are the endpoint's, so rendering, sampling and records
    are those of training's gateway.
    """

    def __init__(self, asking: Asking, settings: GatewaySettings) -> None:
        super().__init__(asking)
        self._settings = settings
        self._url = asking.base_url.rstrip("/").removesuffix("/v1")
        self._open_things = contextlib.AsyncExitStack()

    async def __aenter__(self) -> AgentAsker:
        """Raises ConfigError as `Asker`, and for an endpoint without sessions; SandboxError without a sandbox."""
        await super().__aenter__()
        if self._settings.program.mcp:
            raise ConfigError("gateway.program.mcp: sessions of the endpoint have no tools; leave it out (mcp=false)")
        if not self.gives_trajectories:
            raise ConfigError(f"{self._asking.base_url} has no sessions of agents; --agent needs eval_service.app")
        if self.context_tokens is not None:
            self._settings = self._settings.in_context(self.context_tokens)
        async with contextlib.AsyncExitStack() as stack:
            timeout = aiohttp.ClientTimeout(total=self._asking.timeout_seconds)
            self._http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0), timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
                )
            )
            # Replicas share a port, and a connection has one of them: a new one for each session spreads them.
            self._opener = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(force_close=True), cookie_jar=aiohttp.DummyCookieJar()
                )
            )
            self._relay = SessionRelay(self._http)
            self._host = AgentHost(self._relay, self._settings.program)
            stack.push_async_callback(self._host.close)
            await self._host.start()
            self._open_things = stack.pop_all()
        return self

    async def __aexit__(self, *what: object) -> None:
        await self._open_things.aclose()
        await super().__aexit__(*what)

    def describe(self) -> dict[str, Any]:
        """As `Asker.describe`, with the program and its sessions."""
        settings = self._settings.model_dump(mode="json") | {"program": self._settings.program.describe()}
        return super().describe() | {"gateway": settings}

    def digest_parts(self, problem: Problem) -> list[Any]:
        return [*super().digest_parts(problem), self._settings.model_dump(mode="json")]

    async def ask(self, problem: Problem, sample: int) -> Record:
        """One run of the program. Raises ConfigError for a row that a program cannot be given, or an endpoint that has
        no sessions."""
        began = time.perf_counter()
        blank = Record(problem.index, sample, self.digest(problem), problem=problem.digest)
        where, judges = f"row {problem.index} of the data", self._settings.program.judges
        task = AgentTask.of_row(problem.messages, problem.tools_kwargs, problem.verification, where, judges=judges)
        try:
            session = await self.open_session(sample)
            trajectory = await self._host.run(session, task, partial(self._finish, session))
        except _EndpointError as error:
            return replace(blank, error=str(error))
        if trajectory.excluded in (Excluded.FAULT, Excluded.ABORTED):
            words = "the engine gave an answer up" if trajectory.fault is None else trajectory.fault.message
            return replace(blank, error=words)
        return replace(
            blank,
            content=next((s.text for s in reversed(trajectory.response) if s.author is Author.MODEL), ""),
            finish_reason="stop",
            stop_reason=trajectory.stop.value,
            usage=usage_of([trajectory], 1).as_dict(),
            seconds=time.perf_counter() - began,
            trajectory=trajectory,
        )

    async def open_session(self, sample: int) -> RemoteSession:
        """A session of the endpoint, with the sampling of an answer. Raises ConfigError if it has none."""
        asking, options = self._asking, self._settings.session
        seed = None if asking.seed is None else asking.seed + sample
        flags = {"temperature": asking.temperature, "top_p": asking.top_p, "seed": seed}
        sampling = options.sampling | {name: value for name, value in flags.items() if value is not None}
        fields = options.model_dump(mode="json") | {"sampling": sampling}
        if asking.max_tokens is not None:
            fields["max_tokens"] = asking.max_tokens
        opened = await self._call(self._opener, self._url + SESSIONS_PATH, fields)
        session = RemoteSession(opened["id"], opened["key"], self._url_at(opened.get("port")))
        self._relay.sessions[session.id] = session
        return session

    async def _finish(self, session: RemoteSession) -> FinishedSession:
        self._relay.sessions.pop(session.id, None)
        finished = await self._call(self._http, f"{session.url}{SESSIONS_PATH}/{session.id}/finish", {})
        if session.failure is not None:
            raise _EndpointError(session.failure)
        return FinishedSession(Trajectory.from_json(encode_json(finished["trajectory"])), int(finished["requests"]))

    def _url_at(self, port: int | None) -> str:
        """The endpoint at another port. Raises ConfigError if it is called through TLS, which is not there."""
        if port is None:
            return self._url
        parts = urlsplit(self._url)
        if parts.scheme != "http":
            raise ConfigError(
                f"{self._url} has several replicas, whose sessions are at ports of their own, such as {port}, without "
                "TLS; give --base_url http://… of the machine itself, or serve one model (--num_models 1)"
            )
        return parts._replace(netloc=f"{parts.netloc.removesuffix(f':{parts.port}')}:{port}", path="").geturl()

    async def _call(self, http: aiohttp.ClientSession, url: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Raises ConfigError if the endpoint has no such route or asks for another key, else _EndpointError."""
        headers = {"authorization": f"Bearer {self._asking.api_key}"}
        timeout = aiohttp.ClientTimeout(total=_ADMIN_SECONDS)
        try:
            async with http.post(url, json=fields, headers=headers, timeout=timeout) as answer:
                if answer.status < 300:
                    content: dict[str, Any] = await answer.json()
                    return content
                words = f"{url} answered with {answer.status}: {(await answer.text())[:500]}"
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            raise _EndpointError(f"{url} failed: {error or type(error).__name__}") from error
        if url.endswith(SESSIONS_PATH) and answer.status in _MISCONFIGURED:
            raise ConfigError(f"{words}; sessions need eval_service.app, and its key")
        raise _EndpointError(words)
