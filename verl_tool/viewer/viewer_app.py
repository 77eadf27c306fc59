"""The viewer's HTTP application: pages from the package, what runs have left as JSON, and the ways to an endpoint
and to branches.

Nothing is changed but by `branch_jobs`, where that is allowed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eval_service.evaluation.comparison import Evaluated, compare, read_evaluation
from eval_service.evaluation.record import ABOUT, RECORDS
from eval_service.model.checkpoint import last_saved_step
from verl_tool.errors import ConfigError
from verl_tool.http.host_check import HostCheck
from verl_tool.http.messages import Disconnected, HeaderMap, HttpError, JsonResponse, error_response, headers_of
from verl_tool.trainer.monitoring.run_metrics import Metrics
from verl_tool.trainer.monitoring.time_by_phase import PHASES
from verl_tool.trainer.monitoring.token_records import tokens_of
from verl_tool.util.confined_files import open_confined, read_confined
from verl_tool.viewer import record_query
from verl_tool.viewer.branch_jobs import BranchJobs
from verl_tool.viewer.branch_tree import branches_of, values_of
from verl_tool.viewer.endpoint_proxy import EndpointProxy
from verl_tool.viewer.headlines import CURVES
from verl_tool.viewer.record_index import Records
from verl_tool.viewer.record_query import Query
from verl_tool.viewer.run_files import Run, printable
from verl_tool.viewer.run_watch import RunWatch, UnknownRunError
from verl_tool.viewer.token_texts import TokenTexts

STATIC = files("verl_tool.viewer") / "static"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Of every answer: whatever a trajectory holds, no script runs but the package's own."""
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
IMAGE_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "gif": "image/gif"}
MAX_IMAGE_BYTES = 64 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")

Provided = Mapping[str, str]
"""A request's query string."""


class ViewerApp:
    """Answers about the runs that `watch` knows."""

    def __init__(self, watch: RunWatch, tokens: TokenTexts) -> None:
        self._watch = watch
        self._tokens = tokens

    def routes(self) -> list[Route]:
        answers: list[Callable[[Provided], Any]] = [
            *(self.runs, self.metrics, self.config, self.facets, self.rows, self.group, self.trajectory, self.pieces),
            *(self.image, self.by_file, self.prompts, self.compare),
        ]
        return [
            Route("/", _page),
            Route("/static/{name}", _static),
            *(Route(f"/api/{answer.__name__}", _answering(answer)) for answer in answers),
        ]

    def runs(self, given: Provided) -> list[dict[str, Any]]:
        """Each run with its course in short."""
        return [self._overview(run) for run in self._watch.runs.values()]

    def _overview(self, run: Run) -> dict[str, Any]:
        metrics: Metrics = []
        problem = None
        try:
            metrics = self._watch.metrics(run)
            problem = self._watch.metrics_problem(run)
        except OSError as error:
            problem = str(error)
        rewards = [data["critic/score/mean"] for _, data in metrics if "critic/score/mean" in data]
        paths = [run.file] if run.file else [run.folder / "metrics.jsonl", run.folder / "records.jsonl"]
        changed = [path.stat().st_mtime for path in paths if path.is_file()]
        evaluation = (run.folder / "records.jsonl").exists()
        return {
            "name": run.name,
            "kind": "training" if metrics else "evaluation" if evaluation else "records",
            "folder": printable(str(run.file or run.folder)),
            "rewards": rewards[-200:],
            "steps": metrics[-1][0] if metrics else 0,
            "checkpoint": last_saved_step(run.folder),
            "changed": max(changed, default=None),
            "problem": problem and printable(problem),
        }

    def metrics(self, given: Provided) -> dict[str, Any]:
        """Curves over steps: the headline ones, and those named in ``names`` (separated by commas)."""
        metrics = self._watch.metrics(self._run(given))
        names = list(dict.fromkeys(name for _, data in metrics for name in data))
        curves = [{"title": c.title, "form": c.form, "names": c.names(names)} for c in CURVES]
        curve_names = {name for curve in CURVES for name in curve.names(names)}
        curve_names |= {f"timing_s/{timer}" for timers in PHASES.values() for timer in timers} | {"timing_s/step"}
        curve_names |= set(given.get("names", "").split(","))
        return {
            "steps": [step for step, _ in metrics],
            "series": {name: [data.get(name) for _, data in metrics] for name in names if name in curve_names},
            "names": names,
            "curves": [curve for curve in curves if curve["names"]],
            "phases": {phase: [f"timing_s/{timer}" for timer in timers] for phase, timers in PHASES.items()},
        }

    def config(self, given: Provided) -> dict[str, str]:
        return self._run(given).config()

    def rows(self, given: Provided) -> dict[str, Any]:
        """A page of the table: `Query`, ``offset`` and ``limit``."""
        records = self._records(given)
        offset, limit = (record_query.whole_number(given.get(name, "0"), name) for name in ("offset", "limit"))
        return _state(records) | record_query.page(records, Query.of(given), offset, limit)

    def facets(self, given: Provided) -> dict[str, Any]:
        """What a table may be filtered by."""
        records = self._records(given)
        listed = [{"name": file.name, "kind": file.kind, "step": file.step} for file in records.files]
        return (
            _state(records)
            | {"files": listed, "problems": records.problems}
            | record_query.facets(records, Query.of(given))
        )

    def by_file(self, given: Provided) -> dict[str, Any]:
        """Means and tools, step by step."""
        records = self._records(given)
        return _state(records) | {"by_file": record_query.by_file(records)}

    def prompts(self, given: Provided) -> dict[str, Any]:
        """Prompts that were sampled at several steps."""
        return record_query.prompts(self._records(given), given.get("kind", ""))

    def trajectory(self, given: Provided) -> Response:
        """One record as it stands in its file, its row, its neighbours in the table of the query, and its branches."""
        records = self._records(given)
        number = self._row_number(records, given)
        line = records.line(records.rows[number])
        try:
            msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            line = msgspec.json.encode({"unreadable": line[: 1 << 16].decode("utf-8", "replace")})
        row = record_query.row_as_json(records, number, texts=False)
        around = record_query.neighbours(records, Query.of(given), number)
        file = records.files[records.rows[number]["file"]]
        tokens = tokens_of(file.path, row["line"], file.folder)
        trainer = {name: column.tolist() for name, column in tokens.items()} or None
        branches = branches_of(records, row["file"], row["line"])
        values = values_of(self._run(given), row["file"], row["line"])
        content = {"row": row, **around, "record": msgspec.Raw(line), "trainer": trainer}
        content |= {"branches": branches, "values": values}
        return JsonResponse(msgspec.json.encode(content))

    def group(self, given: Provided) -> dict[str, Any]:
        """The rows that are samples of one prompt, in one file."""
        records = self._records(given)
        numbers = record_query.group_of(records, self._row_number(records, given))
        return {"rows": [record_query.row_as_json(records, number, texts=False) for number in numbers]}

    def pieces(self, given: Provided) -> dict[str, Any]:
        """The text of each token, a list a segment; null where no tokenizer is at hand, with the reason."""
        run, records = self._run(given), self._records(given)
        line = records.line(records.rows[self._row_number(records, given)])
        return self._tokens.of_line(run, line)

    def compare(self, given: Provided) -> dict[str, Any]:
        """Two evaluations, named in ``run`` with a comma between, problem by problem."""
        names = given.get("run", "").split(",")
        if len(names) != 2:
            raise ConfigError(f"{len(names)} evaluations are chosen; a comparison is of two")
        first, second = (self._evaluated(self._watch.run(name)) for name in names)
        return asdict(compare(first, second))

    @staticmethod
    def _evaluated(run: Run) -> Evaluated:
        for name in (RECORDS, ABOUT):
            path = run.folder / name
            if path.exists():
                open_confined(path, run.folder).close()  # no link leads out of the folder
        return replace(read_evaluation(run.folder), name=run.name)

    def image(self, given: Provided) -> Response:
        """An image that a segment stands for."""
        digest = given.get("sha256", "")
        if not _SHA256.fullmatch(digest):
            raise ConfigError(f"sha256={digest[:80]!r} is no SHA-256 in hexadecimal digits")
        run = self._run(given)
        folder = run.records_folder
        for base in (folder / "images", run.folder / "images"):
            for ending, media_type in IMAGE_TYPES.items():
                with contextlib.suppress(FileNotFoundError):
                    content = read_confined(base / f"{digest}.{ending}", run.folder, MAX_IMAGE_BYTES)
                    return Response(content, media_type=media_type)
        raise HttpError(404, "unknown_image", f"there is no image {digest[:12]}… in {folder / 'images'}")

    def _run(self, given: Provided) -> Any:
        return self._watch.run(given.get("run", ""))

    def _records(self, given: Provided) -> Records:
        return self._watch.records(self._run(given))

    @staticmethod
    def _row_number(records: Records, given: Provided) -> int:
        """By ``file`` and ``line``, which stay what they are while a run grows."""
        name, line = given.get("file", ""), record_query.whole_number(given.get("line", "0"), "line")
        file = records.file_number(name)
        ends = [*records.starts[1:], len(records.rows)]
        if file is None or not 0 <= line < ends[file] - records.starts[file]:
            raise HttpError(
                404, "unknown_trajectory", f"there is no line {line} in {name[:80]!r}, or it is not read yet"
            )
        return records.starts[file] + line


def application(
    watch: RunWatch,
    tokens: TokenTexts,
    host_check: HostCheck,
    endpoint: EndpointProxy | None = None,
    branches: BranchJobs | None = None,
) -> ASGIApp:
    """The ASGI application. `watch` is started and stopped with it. `endpoint`: what the live page talks to.
    `branches`: goes on from turns of the runs of `watch`."""
    others = [*(endpoint or EndpointProxy()).routes(), *(branches or BranchJobs(watch)).routes()]
    routes = [*ViewerApp(watch, tokens).routes(), *others]
    return _Guarded(Starlette(routes=routes), watch, host_check)


class _Guarded:
    """Refuses what came for another name, and puts `HEADERS` on every answer."""

    def __init__(self, app: ASGIApp, watch: RunWatch, host_check: HostCheck) -> None:
        self._app, self._watch, self._host_check = app, watch, host_check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        try:
            headers = headers_of(scope)
            self._host_check.reject_foreign(scope, headers)
            _reject_other_sites(scope, headers)
        except HttpError as error:
            await error_response(error)(scope, receive, sending)
            return
        # A client that leaves needs no answer.
        with contextlib.suppress(Disconnected):
            await self._app(scope, receive, sending)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            starts = message["type"] == "lifespan.startup"
            if starts:
                self._watch.start()
            else:
                await run_in_threadpool(self._watch.stop)
            await send({"type": f"{message['type']}.complete"})
            if not starts:
                return


def _reject_other_sites(scope: Scope, headers: HeaderMap) -> None:
    """Raise HttpError 403 for data that a page of another site asks this browser for: searching costs seconds."""
    site = headers.get(b"sec-fetch-site", b"none")
    if scope["path"].startswith("/api/") and site not in (b"same-origin", b"none"):
        words = "a page of another site asks for this; open the viewer itself"
        raise HttpError(403, "forbidden_origin", words, "sec-fetch-site")


def _answering(answer: Callable[[Provided], Any]) -> Callable[[Request], Any]:
    """`answer` as an endpoint, in a thread; what it refuses is told in JSON."""

    async def endpoint(request: Request) -> Response:
        try:
            content = await run_in_threadpool(answer, dict(request.query_params))
        except UnknownRunError as error:
            return error_response(HttpError(404, "unknown_run", str(error)))
        except ConfigError as error:
            return error_response(HttpError(400, "bad_request", str(error)))
        except HttpError as error:
            return error_response(error)
        except OSError as error:
            return error_response(HttpError(404, "gone", f"a file of the run cannot be read: {printable(str(error))}"))
        return content if isinstance(content, Response) else JsonResponse(content)

    return endpoint


def _state(records: Records) -> dict[str, Any]:
    return {"version": records.version, "rows_known": len(records.rows), "missing_bytes": records.missing_bytes}


async def _page(request: Request) -> Response:
    return _file("index.html")


async def _static(request: Request) -> Response:
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    path = STATIC / name
    ending = Path(name).suffix
    if ending not in _TYPES or "/" in name or not path.is_file():
        return error_response(HttpError(404, "unknown_path", f"there is no {name[:80]!r} here"))
    return Response(path.read_bytes(), media_type=_TYPES[ending])
