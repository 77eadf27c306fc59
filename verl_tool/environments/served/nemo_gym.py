"""Our tools and tasks as a NeMo-Gym resources server (https://github.com/NVIDIA-NeMo/Gym), as nemo-gym 0.7 speaks it.

``POST /seed_session`` begins a row and sets the session's cookie, ``POST /TOOL`` calls a tool with its arguments as the
body, ``POST /verify`` grades what the policy wrote. Rows come from `write_rows`: each has the prompt, the tools and its
number here. The ground truth stays here.

NeMo-Gym takes a cookie of before a restart for a session without state. Here a session that is not known any more is an
error of each tool, and `/verify` says ``mask_sample`` with ``failure_kind: session_lost``.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import statistics
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

from starlette.responses import Response

from verl_tool.environments.served.episode import (
    CapacityError,
    EpisodeError,
    EpisodeLostError,
    ServedEpisode,
    ServedEpisodes,
)
from verl_tool.environments.served.row_grader import RowGrade
from verl_tool.environments.served.served_app import ServedApp, read_object
from verl_tool.environments.served.task_rows import TaskRows
from verl_tool.errors import ConfigError
from verl_tool.http.host_check import HostCheck
from verl_tool.http.messages import RETRY_AFTER, HttpError, JsonResponse
from verl_tool.http.web_app import Request
from verl_tool.protocol import ToolDescription
from verl_tool.util.atomic_files import atomic_write

COOKIE = "verl_tool_session"
ROW_FIELD = "verl_tool"
"""Field of a row: ``{"rows": digest of the file, "row": number}``."""
IMAGE_LEFT_OUT = "[an image was left out: outputs of tools are text here]"
MAX_BODY_BYTES = 16 << 20
"""`/verify` gets everything that the policy read and wrote."""
MAX_GRADED = 4096
"""Sessions whose grade is kept for a repeated `/verify`."""
_RESERVED = ("seed_session", "close_session", "verify", "aggregate_metrics", "metrics")
_TASK_INDEX = "_ng_task_index"


def write_rows(rows: TaskRows, tools: Sequence[ToolDescription], output: Path, agent: str) -> int:
    """Write a NeMo-Gym row for each row, for the agent of that name, and return how many. Raises ConfigError for a tool
    that cannot be an endpoint."""
    _check_names(tools)
    described = {tool.name: _function(tool) for tool in tools}
    lines = []
    for row in rows.rows:
        listed = described if row.listed is None else row.listed
        unknown = sorted(set(listed) - set(described))
        if unknown:
            raise ConfigError(f"row {row.index} lists the tools {unknown}, which the tool server does not serve")
        params = {"input": row.messages, "tools": [described[name] for name in listed], "parallel_tool_calls": True}
        line = {
            "responses_create_params": params,
            "agent_ref": {"type": "responses_api_agents", "name": agent},
            ROW_FIELD: {"rows": rows.digest, "row": row.index},
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    with atomic_write(output) as draft:
        draft.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def _function(tool: ToolDescription) -> dict[str, Any]:
    """A tool as OpenAI's Responses API has it."""
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", **described, "strict": False}


def _check_names(tools: Iterable[ToolDescription]) -> None:
    for tool in tools:
        if tool.name in _RESERVED or "/" in tool.name:
            raise ConfigError(f"a tool {tool.name!r} cannot be an endpoint of a NeMo-Gym server; rename it")


@dataclass(frozen=True)
class _Graded:
    """The end of a session."""

    index: int
    grade: RowGrade
    kind: str | None = None
    """NeMo-Gym's failure kind, if there is no reward."""


class NemoGymApp(ServedApp):
    """The resources server."""

    def __init__(
        self,
        episodes: ServedEpisodes,
        *,
        name: str = "verl_tool",
        api_key: str | None = None,
        host_check: HostCheck | None = None,
    ) -> None:
        self._secret = secrets.token_bytes(32)
        self._graded: OrderedDict[str, _Graded] = OrderedDict()
        super().__init__(
            episodes,
            [
                ("POST", "/seed_session", self._seed),
                ("POST", "/close_session", self._close),
                ("POST", "/verify", self._verify),
                ("POST", "/aggregate_metrics", self._aggregate),
                ("POST", "/{tool}", self._call),
            ],
            name=name,
            api_key=api_key,
            host_check=host_check,
            max_body_bytes=MAX_BODY_BYTES,
        )

    # Sessions

    async def _seed(self, request: Request) -> Response:
        body = read_object(request, 422)
        if "resources_session_id" in body:
            raise HttpError(
                501, "not_supported", "sessions of an Environment Server are not served; use an agent's /run"
            )
        try:
            episode = self._episodes.open(self._row_number(body))
        except CapacityError as error:
            raise HttpError(503, "overloaded", str(error), headers=RETRY_AFTER) from None
        response = JsonResponse({})
        response.set_cookie(COOKIE, self._cookie_of(episode.id), httponly=True, samesite="lax")
        return response

    def _row_number(self, body: Mapping[str, Any]) -> int | None:
        """The row that a body names; None if no rows are served. Raises HttpError 422 if it names none of them."""
        rows, named = self._episodes.rows, body.get(ROW_FIELD)
        if rows is None:
            return None
        if not isinstance(named, dict) or type(named.get("row")) is not int:
            message = (
                f"the row has no field {ROW_FIELD!r}; make rows by: python -m verl_tool.environments nemo_gym_rows"
            )
            raise HttpError(422, "unknown_row", message, ROW_FIELD)
        if named.get("rows") != rows.digest or not 0 <= named["row"] < len(rows):
            message = (
                f"row {named['row']} of {str(named.get('rows'))[:40]!r} is not served here, but the {len(rows)} rows "
                f"of {rows.digest!r}; make the rows anew, or serve their file"
            )
            raise HttpError(422, "unknown_row", message, ROW_FIELD)
        return int(named["row"])

    def _cookie_of(self, episode_id: str) -> str:
        name = f"{self._episodes.name}.{episode_id}"
        return f"{name}.{hmac.new(self._secret, name.encode(), 'sha256').hexdigest()}"

    def _session_id(self, request: Request) -> str:
        """The session's id. Raises HttpError 400 without a cookie, and 410 with one that this process did not sign."""
        try:
            cookie = SimpleCookie(request.headers.get(b"cookie", b"").decode("latin-1")).get(COOKIE)
        except CookieError:
            cookie = None
        if cookie is None:
            raise HttpError(400, "no_session", f"the cookie {COOKIE!r} is missing; POST /seed_session first")
        server, _, rest = cookie.value.partition(".")
        episode_id = rest.partition(".")[0]
        if hmac.compare_digest(cookie.value.encode(), self._cookie_of(episode_id).encode()):
            return episode_id
        if server != self._episodes.name:
            raise _lost(f"the session is of {server[:40]!r}, and this server is {self._episodes.name!r}: it restarted")
        raise HttpError(403, "bad_cookie", f"the cookie {COOKIE!r} is not one that this server signed")

    def _episode(self, session_id: str) -> ServedEpisode:
        """Raises HttpError 410 if the episode was closed."""
        episode = self._episodes.find(session_id)
        if episode is None:
            raise _lost(
                f"the session was closed: it was verified, or idle for {self._episodes.limits.idle_seconds:g} s"
            )
        return episode

    # Routes

    async def _call(self, request: Request) -> Response:
        arguments = read_object(request, 422)
        episode = self._episode(self._session_id(request))
        tool = request.path_params["tool"]
        try:
            outcome = await episode.call(tool, arguments)
        except EpisodeError as error:
            raise HttpError(422, "bad_request", str(error)) from None
        except EpisodeLostError as error:
            self._end(episode, RowGrade(failure=str(error)), "session_lost")
            raise _lost(str(error)) from None
        status = 404 if outcome.error == "tool_not_found" else 422 if outcome.is_error else 200
        text = "\n".join([outcome.text, *[IMAGE_LEFT_OUT] * len(outcome.images)])
        return Response(text, status, media_type="text/plain")

    async def _verify(self, request: Request) -> Response:
        body = read_object(request, 422)
        index, turns = self._row_number(body), _turns_in(body)
        if index is None:
            raise HttpError(501, "no_rows", "no rows are served, so that nothing can be graded; start with --rows")
        try:
            graded = await self._grade(self._session_id(request), index, turns)
        except HttpError as error:
            if error.status != 410:
                raise
            graded = _Graded(index, RowGrade(failure=error.message), "session_lost")
        if graded.index != index:
            raise HttpError(422, "unknown_row", f"the session is of row {graded.index}, and the body of {index}")
        failure = graded.grade.failure or None
        numbers = {name: value for name, value in graded.grade.numbers.items() if math.isfinite(value)}
        answer = {
            **body,
            **({"acc": numbers["acc"]} if "acc" in numbers else {}),
            "reward": graded.grade.reward or 0.0,
            "mask_sample": graded.grade.reward is None,
            "failure_kind": graded.kind,
            "failure_reason": failure,
        }
        return JsonResponse(answer)

    async def _grade(self, session_id: str, index: int, turns: Sequence[str]) -> _Graded:
        """The grade of a session, which ends. Raises HttpError 410 if it is not known."""
        if (graded := self._graded.get(session_id)) is not None:
            return graded
        episode = self._episode(session_id)
        row = episode.row
        if row is None or row.index != index:
            return _Graded(_index_of(episode), RowGrade())
        try:
            grade, kind = await episode.grade(turns), "judge_failed"
        except EpisodeLostError as error:
            grade, kind = RowGrade(failure=str(error)), "session_lost"
        await episode.close()
        return self._end(episode, grade, kind if grade.reward is None else None)

    def _end(self, episode: ServedEpisode, grade: RowGrade, kind: str | None) -> _Graded:
        graded = self._graded[episode.id] = _Graded(_index_of(episode), grade, kind)
        while len(self._graded) > MAX_GRADED:
            self._graded.popitem(last=False)
        return graded

    async def _close(self, request: Request) -> Response:
        raise HttpError(501, "not_supported", "sessions end with /verify, or when they are idle")

    async def _aggregate(self, request: Request) -> Response:
        """Means over the rollouts that count, as NeMo-Gym's agents ask for them."""
        responses = read_object(request, 422).get("verify_responses")
        if not isinstance(responses, list) or not all(isinstance(each, dict) for each in responses):
            raise HttpError(422, "bad_request", "verify_responses must be a list of objects", "verify_responses")
        counted = [each for each in responses if not each.get("mask_sample")]
        groups: dict[Any, list[float]] = {}
        for each in counted:
            groups.setdefault(each.get(_TASK_INDEX), []).append(float(each.get("reward") or 0.0))
        rewards = [reward for group in groups.values() for reward in group]
        metrics = {"mean/reward": statistics.fmean(rewards)} if rewards else {}
        metrics["masked"] = float(len(responses) - len(counted))
        tasks = [{_TASK_INDEX: task, "mean/reward": statistics.fmean(group)} for task, group in groups.items()]
        return JsonResponse({"group_level_metrics": tasks, "agent_metrics": metrics, "key_metrics": metrics})


def _lost(why: str) -> HttpError:
    return HttpError(410, "session_lost", f"{why}. Its state is lost")


def _turns_in(body: Mapping[str, Any]) -> list[str]:
    """What the policy wrote in addition to its calls, a text for each message. Raises HttpError 422 without any
    output."""
    response = body.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    if not isinstance(output, list):
        raise HttpError(422, "bad_request", "response.output must be a list of items", "response")
    turns = [_text_of(item) for item in output if _is_message(item)]
    # A rollout that was cut behind a call has no answer, whatever it wrote before.
    ends_in_answer = bool(output) and _is_message(output[-1])
    return turns if ends_in_answer else [*turns, ""]


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and item.get("type") == "message" and item.get("role") == "assistant"


def _text_of(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _index_of(episode: ServedEpisode) -> int:
    return -1 if episode.row is None else episode.row.index
