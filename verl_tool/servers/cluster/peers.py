"""One replica's way to the others: sends them what is theirs, over a pool of connections, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
from pydantic import ValidationError

from verl_tool.errors import VerlToolError
from verl_tool.protocol import (
    BEGUN_HEADER,
    MISDIRECTED,
    REPLICA_HEADER,
    SERVER_HEADER,
    STARTED,
    Fault,
    FaultKind,
    ForkRequest,
    ForkResponse,
    ObservationResponse,
    StepRequest,
    StepResult,
    proof_of,
    request_body,
)
from verl_tool.servers.cluster.members import Member
from verl_tool.servers.replica.router import FORWARDED_HEADER, PEER_KEY_HEADER
from verl_tool.util.json_text import encode_json

CONNECT_SECONDS = 2.0
"""Deadline for a connection to a peer."""
KEEP_ALIVE_SECONDS = 30.0
"""How long an idle connection is kept; a direct server keeps it longer, so that it never closes one in use."""
ANSWER_MARGIN_SECONDS = 5.0
"""A peer has its own deadline and answers in time; this much more is waited for its answer."""


class PeerError(VerlToolError):
    """A peer gave no answer that can be used."""


class PeerAwayError(PeerError):
    """Nothing was run: no connection to the peer, or somebody else is there by now.

    `dead`: the peer is gone for good, for nobody, or somebody else, listens at its port.
    """

    def __init__(self, message: str, *, dead: bool) -> None:
        super().__init__(message)
        self.dead = dead


class PeerBrokenError(PeerError):
    """The connection broke, or the answer made no sense; the request may have been run."""


class PeerTimeoutError(PeerError):
    """The peer did not answer in time; the request may have been run."""


class Peers:
    """Connections to the other replicas' direct servers.

    `api_key`: of the server, if it has one. `server`: its name.
    """

    def __init__(self, *, request_timeout_seconds: float, api_key: str | None, server: str = "") -> None:
        self._timeout = aiohttp.ClientTimeout(
            total=request_timeout_seconds + ANSWER_MARGIN_SECONDS, sock_connect=CONNECT_SECONDS
        )
        self._headers = {FORWARDED_HEADER: "1", "content-type": "application/json"}
        if server:
            self._headers[SERVER_HEADER] = server
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {proof_of(api_key, server)}"
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def step(self, peer: Member, requests: Sequence[StepRequest], *, begun: bool = False) -> list[StepResult]:
        """Have `peer` run `requests`; its answers in their order. `begun`: none of them is a new trajectory.

        A refusal of the whole request (its queue is full) becomes each entry's fault. Raises `PeerAwayError`,
        `PeerBrokenError` or `PeerTimeoutError`.
        """
        status, body = await self._send(peer, "POST", "/get_observation", request_body(requests), begun=begun)
        if status != 200:
            fault = _refusal(peer, status, body)
            return [StepResult(request.trajectory_id, valid=False, fault=fault) for request in requests]
        try:
            return ObservationResponse.model_validate_json(body).step_results([r.trajectory_id for r in requests])
        except (ValidationError, ValueError) as error:
            raise PeerBrokenError(f"replica {peer.id} answered with something else: {error}") from error

    async def fork(self, peer: Member, request: ForkRequest) -> ForkResponse:
        """Have `peer` fork a trajectory that it holds. Raises as `step` does."""
        status, body = await self._send(peer, "POST", "/fork", encode_json(request.model_dump()))
        try:
            return ForkResponse.model_validate_json(body)
        except ValidationError as error:
            if status != 200:
                return ForkResponse(trajectory_id=request.new_trajectory_id, fault=_refusal(peer, status, body))
            raise PeerBrokenError(f"replica {peer.id} answered with something else: {error}") from error

    async def ask(self, peer: Member, path: str, seconds: float, question: object = None) -> bytes:
        """What `peer` alone answers at `path`, whatever the status; a `question` is sent as JSON. Raises as `step`."""
        method, body = ("GET", b"") if question is None else ("POST", encode_json(question))
        try:
            _, answer = await asyncio.wait_for(self._send(peer, method, path, body), timeout=seconds)
        except asyncio.TimeoutError:
            raise PeerTimeoutError(f"replica {peer.id} did not answer {path} in {seconds:g} s") from None
        return answer

    async def _send(
        self, peer: Member, method: str, path: str, body: bytes, *, begun: bool = False
    ) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, auto_decompress=False)
        headers = {**self._headers, REPLICA_HEADER: peer.id, PEER_KEY_HEADER: peer.key}
        headers |= {BEGUN_HEADER: STARTED} if begun else {}
        try:
            async with self._session.request(method, peer.url + path, data=body, headers=headers) as response:
                status, answer = response.status, await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            dead = isinstance(getattr(error, "os_error", None), ConnectionRefusedError)
            raise PeerAwayError(f"no connection to replica {peer.id} at {peer.url}: {error}", dead=dead) from error
        except (asyncio.TimeoutError, TimeoutError):
            raise PeerTimeoutError(f"replica {peer.id} did not answer in {self._timeout.total:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise PeerBrokenError(f"the connection to replica {peer.id} broke: {error}") from error
        if status == MISDIRECTED:
            raise PeerAwayError(f"somebody else is at {peer.url}, where replica {peer.id} was", dead=True)
        return status, answer


def _refusal(peer: Member, status: int, body: bytes) -> Fault:
    words = body[:300].decode(errors="replace")
    if status == 503:
        message = f"replica {peer.id} is full: {words}"
        return Fault(kind=FaultKind.OVERLOADED, message=message, retryable=True)
    message = f"replica {peer.id} refused a forwarded request with HTTP {status}: {words}"
    return Fault(
        kind=FaultKind.BAD_REQUEST if status < 500 else FaultKind.TOOL_CRASHED, message=message, retryable=False
    )
