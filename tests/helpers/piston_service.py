"""A stand-in for a Piston server over this project's sandbox: ``GET /api/v2/runtimes`` and ``POST /api/v2/execute`` as
documented by Piston. It knows Python, Bash and ``brew``, whose compiler fails if a program requests it."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from typing import Any, Self

from aiohttp import web
from local_server import LocalServer

from verl_tool.sandbox import Limits, RunResult, SandboxPool

RUNTIMES = [
    {"language": "python", "version": "3.12.0", "aliases": ["py", "py3", "python3"]},
    {"language": "bash", "version": "5.2.0", "aliases": ["sh"]},
    {"language": "brew", "version": "1.0.0", "aliases": ["c++"]},
]
MAX_RUN_MS, MAX_COMPILE_MS = 3000, 10000
OUTPUT_BYTES = 1 << 16
_SHELL = "import subprocess, sys\nsys.exit(subprocess.run(['bash', '0', *sys.argv[1:]]).returncode)"


class PistonService(LocalServer):
    """Piston's API over a sandbox."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        """Bodies of the requests to run a program."""
        self.most_at_once = 0
        self._now = 0

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/api/v2/runtimes", self._runtimes), web.post("/api/v2/execute", self._execute)]

    async def __aenter__(self) -> Self:
        self._pool = SandboxPool(workers=1, warm_modules=())
        await self._pool.start()
        return await super().__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await super().__aexit__(*error)
        await self._pool.close()

    async def _runtimes(self, request: web.Request) -> web.Response:
        return web.json_response(RUNTIMES)

    async def _execute(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        problem = _problem(body)
        if problem:
            return web.json_response({"message": problem}, status=400)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            return web.json_response(await self._answer(body))
        finally:
            self._now -= 1

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        runtime = _runtime(body["language"])
        assert runtime is not None, "_problem finds it"
        files = [(each.get("name") or f"file{i}.code", each["content"]) for i, each in enumerate(body["files"])]
        told = {"language": runtime["language"], "version": runtime["version"]}
        if runtime["language"] == "brew":
            failed = "FAIL" in files[0][1]
            compiled = _stage(stderr="1: error: FAIL\n" if failed else "a warning\n", code=int(failed))
            run = compiled if failed else _stage(stdout=files[0][1])
            return {**told, "compile": compiled, "run": run}
        shell = runtime["language"] == "bash"
        limits = replace(Limits(), wall_seconds=body.get("run_timeout", MAX_RUN_MS) / 1000, output_bytes=OUTPUT_BYTES)
        contents = {("0" if shell and i == 0 else name): text.encode() for i, (name, text) in enumerate(files)}
        code = _SHELL if shell else files[0][1]
        code = f"import sys; sys.argv[1:] = {body.get('args', [])!r}\n{code}" if body.get("args") else code
        result = await self._pool.run(code, stdin=body.get("stdin") or "", files=contents, limits=limits)
        return {**told, "run": _told(result)}


def _runtime(name: str) -> dict[str, Any] | None:
    return next((each for each in RUNTIMES if name == each["language"] or name in each["aliases"]), None)


def _problem(body: dict[str, Any]) -> str:
    """Return Piston's answer to an invalid request."""
    for name in ("language", "version"):
        if not isinstance(body.get(name), str) or not body[name]:
            return f"{name} is required as a string"
    if not isinstance(body.get("files"), list):
        return "files is required as an array"
    for i, file in enumerate(body["files"]):
        if not isinstance(file.get("content"), str):
            return f"files[{i}].content is required as a string"
    runtime = _runtime(body["language"])
    if runtime is None or body["version"] not in ("*", runtime["version"]):
        return f"{body['language']}-{body['version']} runtime is unknown"
    for name, most in (("run_timeout", MAX_RUN_MS), ("compile_timeout", MAX_COMPILE_MS)):
        if body.get(name, 0) > most:
            return f"{name} cannot exceed the configured limit of {most}"
    return ""


def _told(result: RunResult) -> dict[str, Any]:
    status, code, killed_by = None, result.exit_code, None
    if result.timed_out:
        status, code, killed_by = "TO", None, "SIGKILL"
    elif result.stdout_truncated:
        status, code, killed_by = "OL", None, "SIGKILL"
    elif result.signal is not None:
        status, killed_by = "SG", signal.Signals(result.signal).name
    elif result.exit_code:
        status = "RE"
    told = _stage(result.stdout, result.stderr, code)
    return {
        **told,
        "output": result.output,
        "signal": killed_by,
        "status": status,
        "wall_time": result.wall_seconds * 1000,
    }


def _stage(stdout: str = "", stderr: str = "", code: int | None = 0) -> dict[str, Any]:
    return {"stdout": stdout, "stderr": stderr, "output": stdout + stderr, "code": code, "signal": None}


class OddService(LocalServer):
    """Answers every request as `answer` says."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b""
        self.headers: dict[str, str] = {}
        self.wait_seconds = 0.0
        self.closes = False
        self.seen: list[web.Request] = []

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", "/{path:.*}", self._handle)]

    async def _handle(self, request: web.Request) -> web.Response:
        self.seen.append(request)
        await asyncio.sleep(self.wait_seconds)
        if self.closes and request.transport is not None:
            request.transport.abort()
        return web.Response(status=self.status, body=self.body, headers=self.headers)
