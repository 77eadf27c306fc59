"""The tool server's client: many trajectories at once, retries only where nothing runs twice.

    async with ToolClient("http://127.0.0.1:5000") as client:
        result = await client.call("trajectory-1", "<python>print(1+1)</python>", step=0)

A failure of the infrastructure is the ``fault`` of the trajectories that it concerns, never an exception, and never an
observation. What is retried, until the call's deadline or `max_retries`:

- what certainly did not run: no connection, HTTP 503, a fault that the server marks as retryable;
- what may have run (the connection broke, or the answer makes no sense) only if running it again changes nothing: the
  request carries its step (the server answers a repeated step from its record), it only frees a trajectory, or all
  tools of the server are stateless.

An image or audio comes once in a trajectory: a request names those that are here (`known_media`), and in the result
they are parts again (`verl_tool.content.parts`).

Only the entries that failed are sent again. A retry waits `retry_delay` seconds, twice as long each time, with jitter,
and at least as long as the server asks by ``Retry-After``.
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

_MAX_DELAY_SECONDS = 5.0
_MIN_DELAY_SECONDS = 0.01
_NO_END = 1 << 30
_MAX_RETRIES = 3
_SERVER_AWAY = frozenset({FaultKind.UNREACHABLE, FaultKind.OVERLOADED, FaultKind.SHUTTING_DOWN, FaultKind.TIMEOUT})
"""What passes when a server has come back; retried for as long as a call may take."""
_ASK_SECONDS = 5.0
"""Deadline of the client's own questions (which replicas, which tools) on the way to a call."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class _Entry:
    """One trajectory's part of a call, and where its result goes."""

    position: int
    request: StepRequest
    extra: msgspec.Raw
    """`request.extra` as JSON."""
    media: Mapping[str, MediaPart]
    """What `request.known_media` names."""


@dataclass(frozen=True)
class _Outcome:
    """What one try gave for an entry, and how long the server asks to wait before the next one (seconds)."""

    entry: _Entry
    result: StepResult
    wait_seconds: float = 0.0
    sent: bool = True
    """It may have reached a replica, and may have been run if its fault does not say otherwise."""

    def entry_again(self) -> _Entry:
        """The entry as it is sent next; it says so if it may have been run."""
        fault = self.result.fault
        if not self.sent or fault is None or fault.kind not in (FaultKind.TIMEOUT, FaultKind.UNREACHABLE):
            return self.entry
        return replace(self.entry, request=replace(self.entry.request, resent=True))


class ToolClient:
    """Client of one tool server. Use it in one event loop, as an async context manager or with `close`.

    `url`: the server's base URL, with or without ``/get_observation``. `timeout`: seconds for one call, all its retries
    included. `max_retries`: of one call; None: until the time is up while the server cannot be reached or takes
    nothing, as while its replicas are replaced, and 3 of what else may pass. `max_workers`: HTTP requests under way at
    a time. `request_interval`: least seconds between the starts of two HTTP requests. `max_batch`: most trajectories in
    one HTTP request. `direct`: send a trajectory straight to the replica that owns it where the server tells its
    replicas; otherwise everything goes through `url`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        max_retries: int | None = None,
        retry_delay: float = 0.5,
        max_workers: int = 256,
        request_interval: float = 0.0,
        max_batch: int = 256,
        direct: bool = True,
    ) -> None:
        _reject_bad_options(url, timeout, max_retries, retry_delay, max_batch)
        self.url = url.rstrip("/").removesuffix("/get_observation").rstrip("/")
        self._timeout = timeout
        self._max_retries = _NO_END if max_retries is None else max_retries
        self._retry_delay = retry_delay
        self._max_batch = max_batch
        self._direct = direct
        self._pacer = Pacer(max_workers, request_interval)
        self._connections = Connections(api_key, self.url)
        self._map = ReplicaMap(self.url)
        self._media = MediaStore()
        self._server = ""
        """Name of the server, which every request names; empty until it has told it."""
        self._map_lock = asyncio.Lock()
        self._records_steps = False
        """The server answers a repeated step from its record; known once it has told its replicas."""
        self._stateless: bool | None = None
        """All tools of the server are stateless; None until it was asked."""

    async def __aenter__(self) -> ToolClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.close()

    async def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """The results of `requests`, in their order. What failed bears a fault and costs the others nothing.

        Raises TypeError or ValueError for entries that cannot be sent, ConfigError if the server refuses the api key.
        """
        entries = [
            _entry(position, request, self._media.held_by(request.trajectory_id))
            for position, request in enumerate(requests)
        ]
        deadline = self._now() + self._timeout
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
        """The result of one trajectory's action. See `step`."""
        request = StepRequest(trajectory_id, action, step, finish, is_last_step, extra or {})
        return (await self.step([request]))[0]

    async def finish(self, trajectory_ids: Sequence[str]) -> list[StepResult]:
        """Free these trajectories' state on the server. Doing so twice is no error."""
        return await self.step([StepRequest(trajectory_id, "", finish=True) for trajectory_id in trajectory_ids])

    async def fork(self, trajectory_id: str, new_trajectory_id: str) -> None:
        """Give a second trajectory what the tools keep for a first one: both go on from here, each with its own state.

        `new_trajectory_id`: one that was never used. Numbers of steps go on behind those of the first. It is done once,
        however often the connection breaks.

        Raises ToolFault, and there is no second trajectory: ``not_forkable`` if a tool cannot copy its state,
        ``state_lost`` if the first is not known, ``bad_request`` if the second id is in use, ``overloaded`` if there is
        no room for another. Raises ValueError for an id that cannot be sent, ConfigError if the server refuses the api
        key.
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
        """What the server says of itself, asked once. Raises ToolFault if it gives no answer that can be read."""
        try:
            answer = await self._once("GET", f"{self.url}/health", None, self._now() + self._timeout)
        except ExchangeError as error:
            kind = FaultKind.TIMEOUT if error.timed_out else FaultKind.UNREACHABLE
            raise ToolFault(kind, error.message, retryable=True) from error
        return _read(answer, HealthReport)

    async def tools(self) -> list[ToolDescription]:
        """The server's tools. Raises ToolFault if it gives no answer."""
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

        It may run twice if the connection breaks: nothing of a run is left in the sandbox. Raises ToolFault if there is
        no answer.
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
        self, entries: Sequence[_Entry], results: list[StepResult | None], deadline: float, attempt: int
    ) -> None:
        """Fill `results` for `entries`. Batches go out side by side, each retries by itself what failed of it."""
        while entries:
            await self._renew_map(deadline)
            batches = [
                (where, batch)
                for where, group in self._by_place(entries).items()
                for batch in _batches(group, self._max_batch)
            ]
            if len(batches) > 1:
                await _all_of([self._deliver(batch, results, deadline, attempt) for _, batch in batches])
                return
            entries = await self._deliver_batch(*batches[0], results, deadline, attempt)
            attempt += 1

    async def _deliver_batch(
        self,
        where: tuple[str, str],
        entries: Sequence[_Entry],
        results: list[StepResult | None],
        deadline: float,
        attempt: int,
    ) -> list[_Entry]:
        """One try, and the pause before the next; what is to be sent again."""
        again: list[_Outcome] = []
        url, begun = where
        for outcome in await self._send(url, entries, deadline, begun=begun):
            results[outcome.entry.position] = outcome.result
            fault = outcome.result.fault
            if fault is None and outcome.result.done:
                self._map.forget(outcome.result.trajectory_id)
            elif fault is None:
                self._map.pin(outcome.result.trajectory_id, url)
            elif fault.kind == FaultKind.STATE_LOST:
                self._map.mark_started(outcome.result.trajectory_id)
            limited = self._max_retries == _NO_END and fault is not None and fault.kind not in _SERVER_AWAY
            if fault is not None and fault.retryable and attempt < (_MAX_RETRIES if limited else self._max_retries):
                again.append(outcome)
        if not again:
            return []
        delay = self._delay(attempt, max(outcome.wait_seconds for outcome in again))
        if self._now() + delay >= deadline:
            return []
        await asyncio.sleep(delay)
        return [outcome.entry_again() for outcome in again]

    async def _send(self, url: str, entries: Sequence[_Entry], deadline: float, *, begun: str) -> list[_Outcome]:
        """One try. What has no observation bears a fault that says whether the next try is safe."""
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
        """An answer that holds no observations."""
        words = f"{url} answered HTTP {answer.status}: {answer.words()}"
        if answer.status in (401, 403):
            raise _rejected_key(words)
        if answer.status in (429, 503):
            return _faulted(entries, FaultKind.OVERLOADED, words, retryable=True, wait=answer.retry_after())
        if answer.status == 404:
            # Nothing was run; a proxy before the server may answer so while it starts.
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
        """Whether sending it again changes nothing, though it may have been run."""
        if request.finish or (request.step is not None and self._records_steps):
            return True
        if self._stateless is None:
            try:
                # What broke the connection may be in the way of this question too: it is asked as often as a call.
                answer = await self._request("GET", "/tools", None, deadline=deadline)
                self._stateless = not any(tool.stateful for tool in _tools_in(answer))
            except ToolFault:
                return False
        return self._stateless

    async def _renew_map(self, deadline: float) -> None:
        """Ask which replicas there are, if that is due. While one caller asks, the others use the list there is."""
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
                # The front has nobody to ask at the moment.
                self._map.keep()
                return
            self._records_steps = replicas is not None
            self._server = replicas.server if replicas is not None else ""
            self._map.renew(replicas if self._direct else None)

    def _by_place(self, entries: Sequence[_Entry]) -> dict[tuple[str, str], list[_Entry]]:
        """The entries by the base URL that they are sent to, and what only the client knows (`BEGUN_HEADER`)."""
        by_place: dict[tuple[str, str], list[_Entry]] = {}
        for entry in entries:
            trajectory_id = entry.request.trajectory_id
            started = entry.request.step is None and self._map.has_started(trajectory_id)
            begun = STARTED if started else RESENT if entry.request.resent else ""
            where = self._map.url_of(trajectory_id), begun
            by_place.setdefault(where, []).append(entry)
        return by_place

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        trajectory_id: str | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """The answer to a question that may be asked twice, of the replica of a trajectory if there is one.

        `deadline`: by default a whole `timeout` from now. Raises ToolFault if there is none.
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
            # A replica that is closing, or a proxy before the server, answers so.
            if answer.status in (429, 500, 502, 503, 504):
                words = f"{base}{path} answered HTTP {answer.status}: {answer.words()}"
                raise BusyFault(words, answer.retry_after())
            return answer

        return await retry_until(ask, deadline - self._now(), self._delay, self._max_retries)

    async def _base_of(self, trajectory_id: str | None, deadline: float) -> str:
        """The base URL at which to ask about a trajectory; that of the server without one."""
        if trajectory_id is None:
            return self.url
        await self._renew_map(deadline)
        return self._map.url_of(trajectory_id)

    async def _once(self, method: str, url: str, body: bytes | None, deadline: float, *, begun: str = "") -> Answer:
        """One exchange, when there is a place for it. Raises ExchangeError."""
        # Only the list of replicas is asked of whoever answers at the URL.
        server = "" if url == f"{self.url}/replicas" else self._server
        try:
            await self._pacer.begin(deadline - self._now())
        except asyncio.TimeoutError:
            words = "no place for another request before the deadline; raise timeout or max_workers"
            raise ExchangeError(words, sent=False, timed_out=True) from None
        try:
            seconds = deadline - self._now()
            if seconds <= 0:
                raise ExchangeError(f"the deadline of {self._timeout:g} s has passed", sent=False, timed_out=True)
            return await self._connections.exchange(method, url, body, seconds, server, begun=begun)
        except WrongServerError:
            if self._server == server:
                # It may have been started anew: whoever answers at the URL now says who that is.
                self._server = ""
                self._map.distrust()
            raise
        finally:
            self._pacer.end()

    def _delay(self, attempt: int, minimum: float) -> float:
        """Seconds to wait before the next try. Jitter keeps many clients from coming back at the same moment."""
        delay = min(self._retry_delay * 2 ** min(attempt, 16), _MAX_DELAY_SECONDS)
        return max(delay * random.uniform(0.5, 1.0), minimum * random.uniform(1.0, 1.25), _MIN_DELAY_SECONDS)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _entry(position: int, request: StepRequest, media: Mapping[str, MediaPart]) -> _Entry:
    """Raises TypeError or ValueError that names what cannot be sent."""
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
    """Parts of at most `max_batch`, but all entries of one trajectory together: the server keeps their order."""
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
    return ConfigError(f"the server refuses the api key; give api_key as the server has it. {words}")


def _response_in(answer: Answer) -> ObservationResponse | None:
    """The observations in an answer, whatever its status; None if it holds none."""
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
    """The answer as `model`, whatever its status. Raises ToolFault if it is something else."""
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
    """Await all side by side; if one raises, or the caller is cancelled, none is left running."""
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


def _reject_bad_options(url: str, timeout: float, max_retries: int | None, retry_delay: float, max_batch: int) -> None:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url is {url!r}; begin it with http:// or https://")
    if not timeout > 0 or (max_retries or 0) < 0 or retry_delay < 0 or max_batch < 1:
        raise ConfigError(
            f"timeout is {timeout}, max_retries {max_retries}, retry_delay {retry_delay}, max_batch {max_batch}; "
            "timeout must be above 0, max_batch at least 1, the others at least 0"
        )
