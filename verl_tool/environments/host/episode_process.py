"""The process of one episode: reads a request a line from its socket and writes an answer a line, both JSON.

| Request | Answer |
|---|---|
| ``{"begin": environment, "seed", "make", "extract"}`` | ``{"messages"}`` |
| ``{"action": text}`` | ``{"observation", "reward", "done", "truncated"}`` |
| ``{"action": text}`` | ``{"unread": true}`` if `extract` finds nothing in it |
| either | ``{"raised": words}`` if the environment raised; an action may be followed by others |
| ``{"action": text}`` | ``{"failed": words}`` if the game cannot go on |

It ends when the socket is closed. Runs in the foreign interpreter with the standard library only.
"""

from __future__ import annotations

import json
import random
import re
import resource
import sys

from .kinds import GameFailedError, KindError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from socket import socket
    from typing import Any

    from .kinds import HostedGame, Maker

MAX_REQUEST_BYTES = 64 << 20
MAX_OBSERVATION_CHARACTERS = 100_000
"""Of what is longer the middle is left out."""
MAX_ERROR_CHARACTERS = 1000


def serve_episode(connection: socket, makers: Mapping[str, Maker], memory_bytes: int) -> None:
    """Serve one episode until the other side closes the connection."""
    limit_memory(memory_bytes)
    game: HostedGame | None = None
    pattern: re.Pattern[str] | None = None
    with connection.makefile("rwb") as stream:
        while True:
            line = stream.readline(MAX_REQUEST_BYTES)
            if not line.endswith(b"\n"):
                break
            request = json.loads(line)
            try:
                if "begin" in request:
                    pattern = re.compile(request["extract"]) if request["extract"] else None
                    seed_process(request["seed"])
                    game = makers[request["begin"]](request["make"])
                    answer: dict[str, Any] = {"messages": game.begin(request["seed"])}
                else:
                    assert game is not None
                    answer = play(game, pattern, request["action"])
            except GameFailedError as error:
                answer = {"raised" if "begin" in request else "failed": str(error)[:MAX_ERROR_CHARACTERS]}
            except Exception as error:  # noqa: BLE001  (an environment may raise anything)
                answer = {"raised": describe_error(error)}
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()
    if game is not None:
        game.close()


def play(game: HostedGame, pattern: re.Pattern[str] | None, turn: str) -> dict[str, Any]:
    """Play the action in the model's `turn`: the last match of `pattern`, or the whole turn."""
    if pattern is not None:
        matches = list(pattern.finditer(turn))
        if not matches:
            return {"unread": True}
        turn = next((group for group in matches[-1].groups() if group is not None), matches[-1].group())
    observation, reward, done = game.step(turn)
    return {"observation": shorten(observation), "reward": reward, "done": done, "truncated": game.truncated}


def shorten(text: str) -> str:
    """Leave out the middle of a long text."""
    surplus = len(text) - MAX_OBSERVATION_CHARACTERS
    if surplus <= 0:
        return text
    half = MAX_OBSERVATION_CHARACTERS // 2
    return f"{text[:half]}\n[{surplus} characters left out]\n{text[-half:]}"


def describe_error(error: BaseException) -> str:
    """Return an exception's type and message."""
    words = str(error) if isinstance(error, KindError) else f"{type(error).__name__}: {error}"
    return words[:MAX_ERROR_CHARACTERS]


def seed_process(seed: int) -> None:
    """Seed the random states of the process, from which many games draw."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def limit_memory(surplus_bytes: int) -> None:
    """Let this process take so many bytes of address space more than it has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + surplus_bytes if hard == resource.RLIM_INFINITY else min(hard, size + surplus_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
