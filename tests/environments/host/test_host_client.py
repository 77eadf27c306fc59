"""Episodes in processes of the host, with toy games and a real child process."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from verl_tool.environments.host import episode_process, fork_server, kinds
from verl_tool.environments.host.host_client import (
    EpisodeExitedError,
    HostClient,
    HostEpisode,
    HostError,
    HostSettings,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
GAMES = str(Path(__file__).parents[2] / "helpers" / "toy_games.py")
NAMES = [f"{GAMES}:{name}" for name in ("Guess", "Naughty", "Draws", "Broken", "Numbers")]
GUESS, NAUGHTY, DRAWS, BROKEN, NUMBERS = NAMES
SECONDS = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host() -> AsyncIterator[HostClient]:
    client = HostClient(HostSettings(sys.executable, NAMES, memory_mb=200, start_seconds=60))
    await client.start()
    yield client
    await client.close()


async def begin(host: HostClient, name: str, seed: int = 0, make: dict | None = None) -> tuple[HostEpisode, str]:
    episode = await host.open(SECONDS)
    answer = await episode.ask({"begin": name, "seed": seed, "make": make or {}, "extract": ""}, SECONDS)
    return episode, answer["messages"][0]["content"] if "messages" in answer else answer["raised"]


async def act(episode: HostEpisode, action: str, seconds: float = SECONDS) -> dict:
    return await episode.ask({"action": action}, seconds)


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_an_episode_is_played(host: HostClient) -> None:
    episode, first = await begin(host, GUESS, make={"below": 3})
    assert first == "Guess a number below 3."
    answers = [await act(episode, str(guess)) for guess in range(3)]
    assert [a["reward"] for a in answers].count(1.0) == 1
    assert {"observation": "Right.", "reward": 1.0, "done": True, "truncated": False} in answers
    assert (await act(episode, "many"))["raised"].startswith("ValueError: invalid literal")
    await host.end(episode)


async def test_the_same_seed_gives_the_same_episode_whatever_runs_concurrently(host: HostClient) -> None:
    async def play(seed: int) -> list[str]:
        episode, first = await begin(host, DRAWS, seed)
        seen = [first, *[(await act(episode, "go"))["observation"] for _ in range(3)]]
        await host.end(episode)
        return seen

    alone = [await play(seed) for seed in range(4)]
    together = await asyncio.gather(*[play(seed % 4) for seed in range(16)])
    assert together == [alone[seed % 4] for seed in range(16)]
    assert len({tuple(seen) for seen in alone}) == 4


async def test_what_an_episode_does_to_itself_hurts_no_other(host: HostClient) -> None:
    other, _ = await begin(host, GUESS)
    episode, _ = await begin(host, NAUGHTY)
    assert (await act(episode, "print 200"))["observation"] == "printed"
    assert (await act(episode, "fill 50"))["observation"] == "50 MB"
    assert (await act(episode, "fill 4000"))["raised"].startswith("MemoryError")
    long = (await act(episode, f"long {10**6}"))["observation"]
    assert len(long) < episode_process.MAX_OBSERVATION_CHARACTERS + 100
    assert "900000 characters left out" in long
    with pytest.raises(EpisodeExitedError, match="exit code 3") as exited:
        await act(episode, "exit 3")
    assert exited.value.by_itself
    assert "wrong" in (await act(other, "99"))["observation"]
    await host.end(episode)
    await host.end(other)


async def test_a_process_that_hangs_is_killed(host: HostClient) -> None:
    episode, first = await begin(host, NAUGHTY)
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        await act(episode, "hang", seconds=0.2)
    await host.end(episode, gently=False)
    pid = int(first.rpartition(" ")[2].rstrip("."))
    await wait_until(lambda: not is_running(pid))


async def test_after_a_request_that_was_cancelled_no_answer_is_taken_for_another(host: HostClient) -> None:
    episode, _ = await begin(host, NAUGHTY)
    hanging = asyncio.create_task(act(episode, "hang"))
    await asyncio.sleep(0.05)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    with pytest.raises(EpisodeExitedError):
        await act(episode, "long 1")
    await host.end(episode, gently=False)


async def test_a_process_that_is_killed_did_not_end_by_itself(host: HostClient) -> None:
    episode, first = await begin(host, NAUGHTY)
    os.kill(int(first.rpartition(" ")[2].rstrip(".")), signal.SIGKILL)
    with pytest.raises(EpisodeExitedError, match="SIGKILL") as exited:
        await act(episode, "long 1")
    assert not exited.value.by_itself
    await host.end(episode)


async def test_an_environment_that_does_not_begin_says_why(host: HostClient) -> None:
    for name, words in ((BROKEN, "no game today"), (NUMBERS, "int, not text")):
        episode, raised = await begin(host, name)
        assert words in raised
        await host.end(episode)
    episode, raised = await begin(host, GUESS, make={"above": 1})
    assert "above" in raised
    await host.end(episode)


async def test_everything_ends_with_the_fork_server_and_with_the_client() -> None:
    for kill in (True, False):
        host = HostClient(HostSettings(sys.executable, [NAUGHTY]))
        await host.start()
        episode, first = await begin(host, NAUGHTY)
        hanging = asyncio.create_task(act(episode, "hang"))
        await asyncio.sleep(0.05)
        assert host.pid is not None
        pids = [host.pid, int(first.rpartition(" ")[2].rstrip("."))]
        if kill:
            os.kill(host.pid, signal.SIGKILL)
            with pytest.raises(EpisodeExitedError, match="lost with its host") as exited:
                await hanging
            assert not exited.value.by_itself
            with pytest.raises(HostError, match="exited"):
                await host.open(SECONDS)
        await host.close()
        if not kill:
            with pytest.raises(EpisodeExitedError):
                await hanging
        await wait_until(lambda pids=pids: not any(map(is_running, pids)))


async def test_a_parent_that_is_killed_leaves_no_process() -> None:
    script = (
        "import asyncio, os, sys, time\n"
        "from verl_tool.environments.host.host_client import HostClient, HostSettings\n"
        "async def main():\n"
        "    host = HostClient(HostSettings(sys.executable, [sys.argv[1]]))\n"
        "    await host.start()\n"
        "    episode = await host.open(20)\n"
        "    request = {'begin': sys.argv[1], 'seed': 0, 'make': {}, 'extract': ''}\n"
        "    print(host.pid, (await episode.ask(request, 20))['messages'][0]['content'], flush=True)\n"
        "    await episode.ask({'action': 'hang'}, 1000)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        NAUGHTY,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert parent.stdout is not None
    line = (await asyncio.wait_for(parent.stdout.readline(), 60)).decode().split()
    pids = [int(line[0]), int(line[2].rstrip("."))]
    assert all(map(is_running, pids))
    parent.kill()
    await parent.wait()
    await wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("chess", "write KIND:NAME"),
        ("nowhere.at_all:Game", "nowhere"),
        (f"{GAMES}:Chess", "no function or class Chess"),
        ("/no/such/file.py:Game", "no file"),
        ("textworld:/no/such/folder", "textworld"),
    ],
)
async def test_an_environment_that_is_not_there_is_an_error_at_the_start(name: str, words: str) -> None:
    host = HostClient(HostSettings(sys.executable, [name]))
    with pytest.raises(HostError, match=words):
        await host.start()
    assert not host.alive


async def test_an_interpreter_that_is_none_is_an_error_at_the_start() -> None:
    for python, words in (
        ("/no/such/python", "cannot be started"),
        (shutil.which("true") or "true", "without a message"),
    ):
        with pytest.raises(HostError, match=words):
            await HostClient(HostSettings(python, [GUESS])).start()


async def test_no_secret_of_ours_reaches_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    host = HostClient(HostSettings(sys.executable, [GUESS]))
    await host.start()
    with open(f"/proc/{host.pid}/environ", encoding="utf-8") as file:  # noqa: ASYNC230
        variables = file.read()
    await host.close()
    assert "secret" not in variables
    assert "PATH=" in variables


async def test_the_host_is_written_for_python_3_8_and_its_library() -> None:
    for module in (kinds, episode_process, fork_server):
        tree = ast.parse(inspect.getsource(module), feature_version=(3, 8))
        imported = {
            name.split(".")[0]
            for node in ast.walk(tree)
            for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
            + ([node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else [])
        }
        assert imported <= set(sys.stdlib_module_names)


class OpponentFirst:
    """As much of a game of TextArena as its beginning needs: the other player has the first turn."""

    def reset(self, num_players: int, seed: int) -> None:
        pass

    def get_observation(self) -> tuple[int, list[object]]:
        return 1, []


async def test_an_opponent_that_raises_ends_a_game_for_good() -> None:
    def raising(text: str, random: object) -> str:
        raise ValueError("no move")

    game = kinds.TextArenaGame(OpponentFirst(), raising)
    for play in (lambda: game.begin(0), lambda: game.step("[1]")):
        with pytest.raises(kinds.GameFailedError, match="the opponent raised ValueError: no move"):
            play()


async def test_a_game_that_fails_at_its_beginning_is_an_error_of_the_row() -> None:
    class Failing(kinds.HostedGame):
        def begin(self, seed: int) -> list[dict[str, str]]:
            raise kinds.GameFailedError("no move")

    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rwb") as stream:
        stream.write(json.dumps({"begin": "g", "seed": 0, "make": {}, "extract": None}).encode() + b"\n")
        stream.flush()
        ours.shutdown(socket.SHUT_WR)
        child = os.fork()
        if child == 0:
            try:
                episode_process.serve_episode(theirs, {"g": lambda _: Failing()}, 1 << 30)
            finally:
                os._exit(0)
        assert json.loads(stream.readline()) == {"raised": "no move"}
        await asyncio.to_thread(os.waitpid, child, 0)
