"""The client of the tool server. It serves many trajectories concurrently, and retries only where nothing runs twice.

    async with ToolClient("http://127.0.0.1:5000") as client:
        result = await client.call("trajectory-1", "<python>print(1+1)</python>", step=0)

A failure of the infrastructure becomes the ``fault`` of the affected trajectories, and never an exception or an
observation. Until the call's deadline or `max_retries`, the client retries

- requests that certainly did not run: no connection, HTTP 503, or a fault that the server marks as retryable;
- requests that may have run (the connection broke, or the answer cannot be parsed) only if running them again changes
  nothing: the request has a step (the server answers a repeated step from its record), it only frees a trajectory, or
  all tools of the server are stateless.

An image or audio is sent once per trajectory. A request names those that the client has (`known_media`), and the result
contains them as parts (`verl_tool.content.parts`).

Only the failed entries are sent again. The first retry waits `retry_delay` seconds, and each further one twice as long,
with jitter, and at least as long as the server's ``Retry-After`` says.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from verl_tool.client.exchange import Answer, Connections, ExchangeError, WrongServerError
from verl_tool.client.media_store import MediaStore, read_media_of
from verl_tool.client.pacing import BusyFault, Pacer, retry_until
from verl_tool.client.replica_map import ReplicaMap
from verl_tool.content.parts import MediaPart
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import (
    A_TRAJECTORY_ID,
    KEEP_FIELD,
    RESENT,
    STARTED,
    VERIFY_FIELD,
    Fault,
    FaultKind,
    ForkResponse,
    HealthReport,
    ObservationResponse,
    ReplicaList,
    StepRequest,
    StepResult,
    ToolDescription,
    is_trajectory_id,
    request_body,
)
from verl_tool.sandbox_fusion import RunCodeRequest, RunCodeResponse
from verl_tool.util.json_text import BadJsonError, decode_json, encode_json
from verl_tool.verification import caller_seconds

_MAX_DELAY_SECONDS = 5.0
_MIN_DELAY_SECONDS = 0.01
_NO_END = 1 << 30
_MAX_RETRIES = 3
_SERVER_AWAY = frozenset({FaultKind.UNREACHABLE, FaultKind.OVERLOADED, FaultKind.SHUTTING_DOWN, FaultKind.TIMEOUT})
"""Faults that end when the server is back. They are retried until the deadline of the call."""
_MAY_RUN = frozenset({FaultKind.TIMEOUT, FaultKind.UNREACHABLE, FaultKind.QUEUED})
"""Faults behind which the server may still run what was sent."""
_ASK_SECONDS = 5.0
"""Deadline of the client's own requests (replicas, tools) before a call."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class _Entry:
    """One trajectory's part of a call, with the position of its result."""

    position: int
    request: StepRequest
    extra: msgspec.Raw
    """`request.extra` as JSON."""
    media: Mapping[str, MediaPart]
    """The media that `request.known_media` names."""


@dataclass(frozen=True)
class _Outcome:
    """The result of one attempt for an entry, and the seconds that the server asks to wait before the next one."""

    entry: _Entry
    result: StepResult
    wait_seconds: float = 0.0
    sent: bool = True
    """Whether the entry may have reached a replica. It may then have been run unless its fault says otherwise."""

    def make_retry(self) -> _Entry:
        """Return the entry for the next attempt, marked as resent if it may have been run."""
        fault = self.result.fault
        if not self.sent or fault is None or fault.kind not in _MAY_RUN:
            return self.entry
        return replace(self.entry, request=replace(self.entry.request, resent=True))


@dataclass
class _CallDeadline:
    """The deadline of one call."""

    at: float
    """By the clock of the event loop."""
    queue_seconds: float
    """By how much it may still move while the call waits in a queue of the server."""

    def move(self, seconds: float) -> None:
        """Move it by the time of an attempt for which the call was in a queue."""
        allowed = min(seconds, self.queue_seconds)
        self.at, self.queue_seconds = self.at + allowed, self.queue_seconds - allowed


class ToolClient:
    """Client of one tool server. Use it in one event loop, as an async context manager or with `close`.

    `url` is the server's base URL, with or without ``/get_observation``. `timeout` is the deadline of one call in
    seconds, including all retries; a verification has its own time and `MARGIN_SECONDS`, if that is longer.
    `max_retries` limits the retries of one call. By default, a call is retried until its deadline while the server
    cannot be reached or accepts no calls, as while its replicas are replaced, and 3 times after other transient
    failures. `max_workers` is the maximum number of concurrent HTTP requests, `request_interval`
    the minimum time between two of them, and `max_batch` the maximum number of trajectories in one. While a call
    waits in a queue of the server (`queued`), the deadline moves, by `queue_timeout` seconds at most. `direct` sends
    trajectories straight to their replicas if the server lists them; otherwise all requests go through `url`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        queue_timeout: float = 0.0,
        max_retries: int | None = None,
        retry_delay: float = 0.5,
        max_workers: int = 256,
        request_interval: float = 0.0,
        max_batch: int = 256,
        direct: bool = True,
    ) -> None:
        _reject_bad_options(url, timeout, queue_timeout, max_retries, retry_delay, max_batch)
        self.url = url.rstrip("/").removesuffix("/get_observation").rstrip("/")
        self._timeout = timeout
        self.queue_timeout = queue_timeout
        self._max_retries = _NO_END if max_retries is None else max_retries
        self._retry_delay = retry_delay
        self._max_batch = max_batch
        self._direct = direct
        self._pacer = Pacer(max_workers, request_interval)
        self._connections = Connections(api_key, self.url)
        self._map = ReplicaMap(self.url)
        self._media = MediaStore()
        self._server = ""
        """Name of the server, sent with every request; empty until it is known."""
        self._map_lock = asyncio.Lock()
        self._records_steps = False
        """Whether the server answers a repeated step from its record; False until its replicas are known."""
        self._stateless: bool | None = None
        """Whether all tools of the server are stateless; None until the server was asked."""

    async def __aenter__(self) -> ToolClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.close()

    async def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """Return the results of `requests`, in order. A failed request has a fault and does not affect the others.

        Raises TypeError or ValueError for entries that cannot be sent, ConfigError if the server rejects the API key.
        """
        entries = [
            _entry(position, request, self._media.held_by(request.trajectory_id))
            for position, request in enumerate(requests)
        ]
        seconds = max(
            (caller_seconds(request.extra.get(VERIFY_FIELD), self._timeout) for request in requests),
            default=self._timeout,
        )
        deadline = _CallDeadline(self._now() + seconds, self.queue_timeout)
        results: list[StepResult | None] = [None] * len(requests)
        await self._deliver(entries, results, deadline, attempt=0)
        for request, result in zip(requests, results, strict=True):
            if request.finish or (result is not None and result.done and not request.extra.get(KEEP_FIELD)):
                self._map.forget(request.trajectory_id)
                self._media.forget(request.trajectory_id)
            elif result is not None:
                self._media.keep(result)
        return [result for result in results if result is not None]

    async def call(
        self,
        trajectory_id: str,
        action: str,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        finish: bool = False,
        is_last_step: bool = False,
    ) -> StepResult:
        """Return the result of one trajectory's action. See `step`."""
        request = StepRequest(trajectory_id, action, step, finish, is_last_step, extra or {})
        return (await self.step([request]))[0]

    async def finish(self, trajectory_ids: Sequence[str]) -> list[StepResult]:
        """Free these trajectories' state on the server. It may be called repeatedly."""
        return await self.step([StepRequest(trajectory_id, "", finish=True) for trajectory_id in trajectory_ids])

    async def fork(self, trajectory_id: str, new_trajectory_id: str) -> None:
        """Copy the tools' state of a trajectory to a new one. Both continue from here with separate states.

        `new_trajectory_id` must never have been used. The new trajectory's step numbers continue those of the first.
        The copy is made once, even if the connection breaks and the request is repeated.

        Raises ToolFault if no copy was made: ``not_forkable`` if a tool cannot copy its state, ``state_lost`` if the
        first trajectory is unknown, ``bad_request`` if the new id is in use, ``overloaded`` if the server accepts no
        further trajectory. Raises ValueError for an invalid id, ConfigError if the server rejects the API key.
        """
        for value in (trajectory_id, new_trajectory_id):
            if not is_trajectory_id(value):
                raise ValueError(f"a trajectory id is {value!r:.80}; give {A_TRAJECTORY_ID}")
        requested = encode_json({"trajectory_id": trajectory_id, "new_trajectory_id": new_trajectory_id})
        answer = await self._request("POST", "/fork", requested, trajectory_id)
        if answer.status in (401, 403):
            raise _rejected_key(f"{self.url}/fork answered HTTP {answer.status}: {answer.words()}")
        forked = _read(answer, ForkResponse)
        if forked.fault is not None:
            fault = forked.fault
            raise ToolFault(fault.kind, fault.message, fault.retryable, trajectory_id)
        self._map.place(new_trajectory_id, forked.replica)
        self._media.fork(trajectory_id, new_trajectory_id)

    async def health(self) -> HealthReport:
        """Return the server's health report, without retries. Raises ToolFault if there is no valid answer."""
        try:
            answer = await self._once("GET", f"{self.url}/health", None, self._now() + self._timeout)
        except ExchangeError as error:
            kind = FaultKind.TIMEOUT if error.timed_out else FaultKind.UNREACHABLE
            raise ToolFault(kind, error.message, retryable=True) from error
        return _read(answer, HealthReport)

    async def tools(self) -> list[ToolDescription]:
        """Return the server's tools. Raises ToolFault if there is no answer."""
        answer = await self._request("GET", "/tools", None)
        return _tools_in(answer)

    async def run_code(
        self,
        code: str,
        *,
        language: str = "python",
        stdin: str | None = None,
        run_timeout: float = 10.0,
        compile_timeout: float = 10.0,
        memory_limit_mb: int = -1,
        files: Mapping[str, str] | None = None,
        fetch_files: Sequence[str] = (),
    ) -> RunCodeResponse:
        """Run a program in the server's sandbox (SandboxFusion's schema; contents of `files` are base64).

        The program may run twice if the connection breaks, since a run leaves nothing in the sandbox. Raises ToolFault
        if there is no answer.
        """
        request = RunCodeRequest(
            code=code,
            language=language,
            stdin=stdin,
            run_timeout=run_timeout,
            compile_timeout=compile_timeout,
            memory_limit_MB=memory_limit_mb,
            files=dict(files or {}),
            fetch_files=list(fetch_files),
        )
        answer = await self._request("POST", "/run_code", encode_json(request.model_dump()))
        return _read(answer, RunCodeResponse)

    async def _deliver(
        self, entries: Sequence[_Entry], results: list[StepResult | None], deadline: _CallDeadline, attempt: int
    ) -> None:
        """Fill `results` for `entries`. Batches are sent concurrently, and each retries its own failed entries."""
        while entries:
            await self._renew_map(deadline.at)
            batches = [
                (where, batch)
                for where, group in self._group_by_target(entries).items()
                for batch in _batches(group, self._max_batch)
            ]
            if len(batches) > 1:
                await _all_of([self._deliver(batch, results, replace(deadline), attempt) for _, batch in batches])
                return
            entries, is_queued = await self._deliver_batch(*batches[0], results, deadline, attempt)
            attempt += not is_queued

    async def _deliver_batch(
        self,
        where: tuple[str, str],
        entries: Sequence[_Entry],
        results: list[StepResult | None],
        deadline: _CallDeadline,
        attempt: int,
    ) -> tuple[list[_Entry], bool]:
        """Make one attempt, and wait before the next one. Returns the entries to send again, and whether all wait in
        queues of the server, which is no failure of the attempt."""
        again: list[_Outcome] = []
        url, begun = where
        began = self._now()
        for outcome in await self._send(url, entries, deadline.at, begun=begun):
            position, fault = outcome.entry.position, outcome.result.fault
            # Whether it still waits is not known then.
            is_unknown = not deadline.queue_seconds and fault is not None and fault.kind is FaultKind.TIMEOUT
            if not (is_unknown and _is_queued(results[position])):
                results[position] = outcome.result
            if fault is None and outcome.result.done:
                self._map.forget(outcome.result.trajectory_id)
            elif fault is None or fault.kind == FaultKind.QUEUED:
                self._map.pin(outcome.result.trajectory_id, url)
            elif fault.kind == FaultKind.STATE_LOST:
                self._map.mark_started(outcome.result.trajectory_id)
            limited = self._max_retries == _NO_END and fault is not None and fault.kind not in _SERVER_AWAY
            if fault is not None and fault.retryable:
                allowed = _MAX_RETRIES if limited else self._max_retries
                if attempt < allowed or _is_queued(outcome.result):
                    again.append(outcome)
        if not again:
            return [], False
        is_queued = any(_is_queued(outcome.result) for outcome in again)
        delay = self._delay(0 if is_queued else attempt, max(outcome.wait_seconds for outcome in again))
        if is_queued:
            deadline.move(self._now() + delay - began)
        if self._now() + delay >= deadline.at:
            return [], False
        await asyncio.sleep(delay)
        return [outcome.make_retry() for outcome in again], all(_is_queued(outcome.result) for outcome in again)

    async def _send(self, url: str, entries: Sequence[_Entry], deadline: float, *, begun: str) -> list[_Outcome]:
        """Make one attempt. Entries without an observation get a fault that says whether a retry is safe."""
        body = request_body([entry.request for entry in entries], [entry.extra for entry in entries])
        try:
            answer = await self._once("POST", f"{url}/get_observation", body, deadline, begun=begun)
        except ExchangeError as error:
            if not error.timed_out:
                self._map.avoid(url)
            kind = FaultKind.TIMEOUT if error.timed_out else FaultKind.UNREACHABLE
            return await self._without_answer(entries, kind, error.message, deadline, sent=error.sent)
        if answer.status == 413 and len(entries) > 1:
            half = len(entries) // 2
            parts = [await self._send(url, part, deadline, begun=begun) for part in (entries[:half], entries[half:])]
            return parts[0] + parts[1]
        response = _response_in(answer)
        if response is not None:
            return await _outcomes(entries, response, answer.retry_after())
        return await self._handle_refusal(url, entries, answer, deadline)

    async def _handle_refusal(
        self, url: str, entries: Sequence[_Entry], answer: Answer, deadline: float
    ) -> list[_Outcome]:
        """Return the outcomes for an answer without observations."""
        words = f"{url} answered HTTP {answer.status}: {answer.words()}"
        if answer.status in (401, 403):
            raise _rejected_key(words)
        if answer.status in (429, 503):
            return _faulted(entries, FaultKind.OVERLOADED, words, retryable=True, wait=answer.retry_after())
        if answer.status == 404:
            # Nothing was run. A proxy in front of the server may answer with 404 while the server starts.
            return _faulted(entries, FaultKind.UNREACHABLE, words, retryable=True)
        if 400 <= answer.status < 500:
            return _faulted(entries, FaultKind.BAD_REQUEST, words, retryable=False)
        return await self._without_answer(entries, FaultKind.UNREACHABLE, words, deadline, sent=True)

    async def _without_answer(
        self, entries: Sequence[_Entry], kind: FaultKind, message: str, deadline: float, *, sent: bool
    ) -> list[_Outcome]:
        safe = [not sent or await self._may_run_twice(entry.request, deadline) for entry in entries]
        return [
            outcome
            for entry, again in zip(entries, safe, strict=True)
            for outcome in _faulted([entry], kind, message, retryable=again, sent=sent)
        ]

    async def _may_run_twice(self, request: StepRequest, deadline: float) -> bool:
        """Return whether a request that may have been run can be sent again without changing anything."""
        if request.finish or (request.step is not None and self._records_steps):
            return True
        if self._stateless is None:
            try:
                # The connection may still be broken, so this request is retried as often as a call.
                answer = await self._request("GET", "/tools", None, deadline=deadline)
                self._stateless = not any(tool.stateful for tool in _tools_in(answer))
            except ToolFault:
                return False
        return self._stateless

    async def _renew_map(self, deadline: float) -> None:
        """Request the list of replicas if it is stale. Meanwhile, other callers use the old list."""
        if not self._map.is_stale() or (self._map_lock.locked() and self._map.was_requested):
            return
        async with self._map_lock:
            if not self._map.is_stale():
                return
            try:
                seconds = min(deadline, self._now() + _ASK_SECONDS)
                answer = await self._once("GET", f"{self.url}/replicas", None, seconds)
                # Another server's 404 may be JSON too.
                replicas = _read(answer, ReplicaList) if answer.status == 200 else None
            except (ExchangeError, ToolFault):
                self._map.keep()
                return
            if answer.status >= 500:
                # The server currently has no replica that could answer.
                self._map.keep()
                return
            self._records_steps = replicas is not None
            self._server = replicas.server if replicas is not None else ""
            self._map.renew(replicas if self._direct else None)

    def _group_by_target(self, entries: Sequence[_Entry]) -> dict[tuple[str, str], list[_Entry]]:
        """Group entries by the base URL that they are sent to, and by the value of `BEGUN_HEADER`."""
        groups: dict[tuple[str, str], list[_Entry]] = {}
        for entry in entries:
            trajectory_id = entry.request.trajectory_id
            started = entry.request.step is None and self._map.has_started(trajectory_id)
            begun = STARTED if started else RESENT if entry.request.resent else ""
            where = self._map.url_of(trajectory_id), begun
            groups.setdefault(where, []).append(entry)
        return groups

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        trajectory_id: str | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """Send a request that may be repeated, to the replica of a trajectory if an id is given.

        `deadline` defaults to `timeout` seconds from now. Raises ToolFault if there is no answer.
        """
        deadline = self._now() + self._timeout if deadline is None else deadline

        async def ask(_: float) -> Answer:
            base = await self._base_of(trajectory_id, deadline)
            try:
                answer = await self._once(method, f"{base}{path}", body, deadline)
            except ExchangeError as error:
                if not error.timed_out:
                    self._map.avoid(base)
                kind = FaultKind.TIMEOUT if error.timed_out else FaultKind.UNREACHABLE
                raise ToolFault(kind, error.message, retryable=True) from error
            # A replica that is closing, or a proxy in front of the server, answers with these.
            if answer.status in (429, 500, 502, 503, 504):
                words = f"{base}{path} answered HTTP {answer.status}: {answer.words()}"
                raise BusyFault(words, answer.retry_after())
            return answer

        return await retry_until(ask, deadline - self._now(), self._delay, self._max_retries)

    async def _base_of(self, trajectory_id: str | None, deadline: float) -> str:
        """Return the base URL for a trajectory, or the server's URL without one."""
        if trajectory_id is None:
            return self.url
        await self._renew_map(deadline)
        return self._map.url_of(trajectory_id)

    async def _once(self, method: str, url: str, body: bytes | None, deadline: float, *, begun: str = "") -> Answer:
        """Make one exchange when there is a free slot. Raises ExchangeError."""
        # Only the list of replicas may come from any server at the URL.
        server = "" if url == f"{self.url}/replicas" else self._server
        try:
            await self._pacer.begin(deadline - self._now())
        except asyncio.TimeoutError:
            words = "no free slot for another request before the deadline; raise timeout or max_workers"
            raise ExchangeError(words, sent=False, timed_out=True) from None
        try:
            seconds = deadline - self._now()
            if seconds <= 0:
                raise ExchangeError(f"the deadline of {self._timeout:g} s has passed", sent=False, timed_out=True)
            return await self._connections.exchange(method, url, body, seconds, server, begun=begun)
        except WrongServerError:
            if self._server == server:
                # The server may have been restarted. The next list of replicas has its new name.
                self._server = ""
                self._map.distrust()
            raise
        finally:
            self._pacer.end()

    def _delay(self, attempt: int, minimum: float) -> float:
        """Return the seconds to wait before the next attempt. Jitter keeps clients from retrying at the same moment."""
        delay = min(self._retry_delay * 2 ** min(attempt, 16), _MAX_DELAY_SECONDS)
        return max(delay * random.uniform(0.5, 1.0), minimum * random.uniform(1.0, 1.25), _MIN_DELAY_SECONDS)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _entry(position: int, request: StepRequest, media: Mapping[str, MediaPart]) -> _Entry:
    """Check and encode one request. Raises TypeError or ValueError that names what cannot be sent."""
    if not isinstance(request.trajectory_id, str) or not request.trajectory_id:
        raise ValueError(f"trajectory_id is {request.trajectory_id!r}; give a text that is not empty")
    if not isinstance(request.action, str):
        raise TypeError(f"action is a {type(request.action).__name__}; give the model's text")
    if request.step is not None and (type(request.step) is not int or request.step < 0):
        raise ValueError(f"step is {request.step!r}; give a whole number from 0, or None")
    try:
        extra = msgspec.Raw(encode_json(dict(request.extra)))
    except TypeError as error:
        raise TypeError(f"extra of trajectory {request.trajectory_id!r} cannot be sent as JSON: {error}") from error
    return _Entry(position, replace(request, known_media=tuple(media)) if media else request, extra, media)


def _batches(entries: Sequence[_Entry], max_batch: int) -> list[list[_Entry]]:
    """Split entries into batches of `max_batch`. Entries of one trajectory stay together, to keep their order."""
    batches: list[list[_Entry]] = []
    batch_of: dict[str, list[_Entry]] = {}
    for entry in entries:
        batch = batch_of.get(entry.request.trajectory_id)
        if batch is None:
            if not batches or len(batches[-1]) >= max_batch:
                batches.append([])
            batch = batch_of[entry.request.trajectory_id] = batches[-1]
        batch.append(entry)
    return batches


def _rejected_key(words: str) -> ConfigError:
    return ConfigError(f"the server rejects the API key; set api_key to the server's. {words}")


def _response_in(answer: Answer) -> ObservationResponse | None:
    """Return the observations in an answer with any status, or None if there are none."""
    try:
        value = decode_json(answer.body)
        return ObservationResponse.model_validate(value)
    except (BadJsonError, ValidationError):
        return None


async def _outcomes(entries: Sequence[_Entry], response: ObservationResponse, wait: float) -> list[_Outcome]:
    try:
        results = response.step_results([entry.request.trajectory_id for entry in entries])
    except ValueError as error:
        return _faulted(entries, FaultKind.BAD_REQUEST, str(error), retryable=False)
    return [
        _Outcome(entry, await read_media_of(result, entry.media), wait)
        for entry, result in zip(entries, results, strict=True)
    ]


def _is_queued(result: StepResult | None) -> bool:
    return result is not None and result.fault is not None and result.fault.kind is FaultKind.QUEUED


def _faulted(
    entries: Sequence[_Entry],
    kind: FaultKind,
    message: str,
    *,
    retryable: bool,
    wait: float = 0.0,
    sent: bool = False,
) -> list[_Outcome]:
    fault = Fault(kind=kind, message=message, retryable=retryable)
    return [
        _Outcome(entry, StepResult(entry.request.trajectory_id, valid=False, fault=fault), wait, sent)
        for entry in entries
    ]


def _read(answer: Answer, model: type[Model]) -> Model:
    """Parse an answer with any status as `model`. Raises ToolFault if it is something else."""
    try:
        return model.model_validate(decode_json(answer.body))
    except (BadJsonError, ValidationError):
        words = f"the server answered HTTP {answer.status} and no {model.__name__}: {answer.words()}"
        raise ToolFault(FaultKind.UNREACHABLE, words, retryable=False) from None


class _ToolList(BaseModel):
    tools: list[ToolDescription]


def _tools_in(answer: Answer) -> list[ToolDescription]:
    return _read(answer, _ToolList).tools


async def _all_of(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await all concurrently. If one raises, or the caller is cancelled, cancel the others."""
    if len(works) == 1:
        await works[0]
        return
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _reject_bad_options(
    url: str, timeout: float, queue_timeout: float, max_retries: int | None, retry_delay: float, max_batch: int
) -> None:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url is {url!r}; begin it with http:// or https://")
    if not timeout > 0 or queue_timeout < 0 or (max_retries or 0) < 0 or retry_delay < 0 or max_batch < 1:
        raise ConfigError(
            f"timeout is {timeout}, queue_timeout {queue_timeout}, max_retries {max_retries}, "
            f"retry_delay {retry_delay}, max_batch {max_batch}; "
            "timeout must be above 0, max_batch at least 1, the others at least 0"
        )
