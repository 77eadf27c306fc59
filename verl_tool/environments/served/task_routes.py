"""Routes that list the served rows as tasks, as OpenEnv and the Open Reward Standard have them."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from verl_tool.environments.served.episode import ServedEpisodes
from verl_tool.environments.served.served_app import read_object
from verl_tool.environments.served.task_rows import TaskRow, TaskRows
from verl_tool.http.messages import HttpError, JsonResponse
from verl_tool.http.web_app import Handler, Request

ENVIRONMENT = "/{env_name}"


def describe_task(row: TaskRow) -> dict[str, Any]:
    """What may be known of a row."""
    return {"index": row.index, "messages": row.messages}


class TaskRoutes:
    """The rows of `episodes` as tasks of the environment `name`."""

    def __init__(self, episodes: ServedEpisodes, name: str) -> None:
        self._episodes, self._name = episodes, name

    def routes(self, prefix: str = ENVIRONMENT) -> list[tuple[str, str, Handler]]:
        """All routes; those of one environment begin with `prefix`."""
        return [
            ("GET", "/list_environments", self._environments),
            ("GET", f"{prefix}/splits", self._splits),
            ("POST", f"{prefix}/num_tasks", self._num_tasks),
            ("POST", f"{prefix}/tasks", self._tasks),
            ("POST", f"{prefix}/task", self._task),
            ("POST", f"{prefix}/task_range", self._task_range),
        ]

    async def _environments(self, _: Request) -> Response:
        return JsonResponse([self._name])

    async def _splits(self, request: Request) -> Response:
        rows = self._rows(request)
        return JsonResponse([{"name": rows.split, "type": rows.split}])

    async def _num_tasks(self, request: Request) -> Response:
        return JsonResponse({"num_tasks": len(self._of_split(request)[0])})

    async def _tasks(self, request: Request) -> Response:
        return self._answer(tasks=[describe_task(row) for row in self._of_split(request)[0]])

    async def _task(self, request: Request) -> Response:
        rows, body = self._of_split(request)
        index = body.get("index")
        if type(index) is not int or not 0 <= index < len(rows):
            raise HttpError(400, "bad_request", f"index is {index!r:.40}; send a number from 0 to {len(rows) - 1}")
        return self._answer(task=describe_task(rows[index]))

    async def _task_range(self, request: Request) -> Response:
        rows, body = self._of_split(request)
        bounds = body.get("start"), body.get("stop")
        if any(bound is not None and type(bound) is not int for bound in bounds):
            raise HttpError(400, "bad_request", f"start and stop are {bounds!r:.80}; send numbers, or leave them out")
        return self._answer(tasks=[describe_task(row) for row in rows[slice(*bounds)]])

    def _answer(self, **found: Any) -> Response:
        return JsonResponse({**found, "env_name": self._name})

    def _of_split(self, request: Request) -> tuple[list[TaskRow], dict[str, Any]]:
        rows = self._rows(request)
        body = read_object(request, 400)
        split = body.get("split")
        if split != rows.split:
            raise HttpError(400, "bad_request", f"split is {split!r:.80}; {rows.split!r} is served", "split")
        return rows.rows, body

    def _rows(self, request: Request) -> TaskRows:
        """Raises HttpError 404 if the environment is another one, or has no rows."""
        name = request.path_params.get("env_name", self._name)
        if name != self._name or self._episodes.rows is None:
            raise HttpError(404, "unknown_environment", f"there are no tasks of {name[:80]!r} here")
        return self._episodes.rows
