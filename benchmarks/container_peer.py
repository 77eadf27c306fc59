"""swe-rex for benchmarks/containers.py, by a Python that has it; called with lines of JSON over stdin and stdout.

    python benchmarks/container_peer.py ENGINE IMAGE [ARGUMENT_OF_RUN ...]

A container is started as swe-rex does it itself (``DockerDeployment``), each in a thread and an event loop of its own,
since its wait for the server blocks the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from typing import Any

from swerex.deployment.docker import DockerDeployment
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest


class Peer:
    """The containers by number."""

    def __init__(self, engine: str, image: str, arguments: list[str]) -> None:
        self._settings = {"container_runtime": engine, "image": image, "docker_args": arguments, "pull": "never"}
        self._deployments: dict[int, DockerDeployment] = {}
        self._numbers = itertools.count()

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open a container, run a command in one, or close one."""
        if request["op"] == "open":
            deployment = DockerDeployment(**self._settings)
            await asyncio.to_thread(lambda: asyncio.run(deployment.start()))
            number = next(self._numbers)
            self._deployments[number] = deployment
            return {"number": number, "name": deployment.container_name}
        if request["op"] == "close":
            deployment = self._deployments.pop(request["number"])
            await asyncio.to_thread(lambda: asyncio.run(deployment.stop()))
            return {}
        runtime = self._deployments[request["number"]].runtime
        if request["op"] == "shell":
            await runtime.create_session(CreateBashSessionRequest())
            return {}
        if request["op"] == "in_shell":
            observed = await runtime.run_in_session(BashAction(command=request["command"]))
            return {"code": observed.exit_code, "stdout": observed.output}
        ran = await runtime.execute(Command(command=request["command"], timeout=120))
        return {"code": ran.exit_code, "stdout": ran.stdout}

    async def serve(self) -> None:
        """Answer the requests of stdin, many at a time, until it ends."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        tasks: set[asyncio.Task[None]] = set()

        async def work(request: dict[str, Any]) -> None:
            try:
                answer = await self.answer(request)
            except Exception as error:  # noqa: BLE001  (whatever it is, the benchmark counts it)
                answer = {"error": f"{type(error).__name__}: {error}"}
            sys.__stdout__.write(json.dumps({"id": request["id"], **answer}) + "\n")  # type: ignore[union-attr]
            sys.__stdout__.flush()  # type: ignore[union-attr]

        while line := await reader.readline():
            task = loop.create_task(work(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    sys.stdout = sys.stderr  # the client prints the names of errors
    asyncio.run(Peer(sys.argv[1], sys.argv[2], sys.argv[3:]).serve())
