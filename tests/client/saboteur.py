"""A proxy that breaks things on purpose, in front of a real server."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from verl_tool.protocol import BEGUN_HEADER

PASS = "pass"
DROP_BEFORE = "drop before"
"""Close the connection without passing the request on."""
DROP_AFTER = "drop after"
"""Pass the request on, and close the connection without the answer."""
RESET_AFTER = "reset after"
HALF = "half"
"""Pass the request on, and give half of the answer."""
GARBAGE = "garbage"
"""Pass the request on, and answer 200 with something else."""
HANG = "hang"
"""Pass the request on, and never answer."""
BUSY = "busy"
"""Answer 503 with Retry-After, without passing the request on."""
FAIL = "fail"
"""Answer 500, without passing the request on."""
NOT_FOUND = "not found"
"""Answer 404, as Ray Serve does while an application is being deployed."""


@dataclass
class Saboteur:
    """Proxy of `backend` that does to each POST what `plan` says, and passes everything else on."""

    backend: str
    plan: deque[str] = field(default_factory=deque)
    question_plan: deque[str] = field(default_factory=deque)
    """The same for each question of which tools there are."""
    retry_after: str = "0.1"
    hidden_paths: frozenset[str] = frozenset()
    """GET paths that are answered 404, as by a server of another make."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of the POSTs that came, in order."""
    begun: list[str] = field(default_factory=list)
    """What each of them said of its trajectories (`BEGUN_HEADER`)."""
    times: list[float] = field(default_factory=list)
    """When they came, seconds."""
    connections: int = 0
    """Open connections of clients."""
    most_connections: int = 0
    url: str = ""

    async def __aenter__(self) -> Saboteur:
        self._session = aiohttp.ClientSession()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._tasks: set[asyncio.Task[Any]] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.most_connections = max(self.most_connections, self.connections)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # The client left, or the test ends: asyncio's streams log a handler that is cancelled.
            pass
        finally:
            self.connections -= 1
            self._tasks.discard(task)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split("\r\n")[0].split(" ")
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            if path in self.hidden_paths:
                return self._answer(writer, 404, b'{"detail": "Not Found"}')
            plan = self.question_plan if path == "/tools" else None
            return await self._sabotage(plan.popleft() if plan else PASS, writer, method, path, body)
        self.bodies.append(json.loads(body))
        self.begun.append(headers.get(BEGUN_HEADER, ""))
        self.times.append(asyncio.get_running_loop().time())
        return await self._sabotage(self.plan.popleft() if self.plan else PASS, writer, method, path, body)

    async def _sabotage(self, what: str, writer: asyncio.StreamWriter, method: str, path: str, body: bytes) -> bool:
        if what == DROP_BEFORE:
            return False
        if what == BUSY:
            return self._answer(writer, 503, b"full", f"Retry-After: {self.retry_after}\r\n")
        if what == FAIL:
            return self._answer(writer, 500, b"oops")
        if what == NOT_FOUND:
            return self._answer(writer, 404, b"Path '/get_observation' not found.")
        status, answer = await self._pass_on(method, path, body)
        if what == DROP_AFTER:
            return False
        if what == RESET_AFTER:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if what == HANG:
            await asyncio.sleep(3600)
        if what == HALF:
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode()
            writer.write(head + answer[: len(answer) // 2])
            await writer.drain()
            return False
        if what == GARBAGE:
            return self._answer(writer, 200, b"<html>proxy error</html>")
        return self._answer(writer, status, answer)

    async def _pass_on(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        async with self._session.request(method, self.backend + path, data=body or None) as response:
            return response.status, await response.read()

    @staticmethod
    def _answer(writer: asyncio.StreamWriter, status: int, body: bytes, headers: str = "") -> bool:
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body)
        return True
