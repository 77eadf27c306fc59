"""Steps a second of text games in the host's processes, beside the same games in one process of their own package.

    python benchmarks/text_games.py --peers PEERS     # the folder of scripts/install_peers.sh

Each episode begins, plays `--steps` actions and ends, 1, 8 and 64 at once. ``package`` is a loop over so many games in
one process of the foreign interpreter, without this project's processes and messages.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from load import usage_of_tree
from rich.console import Console
from rich.table import Table

from verl_tool.environments import host
from verl_tool.environments.text_game import TextGame
from verl_tool.formats import Call
from verl_tool.formats.direct import DIRECT

AT_ONCE = (1, 8, 64)
OWN_GAME = Path(__file__).parents[1] / "examples" / "train" / "text_game" / "guess_number.py"
PACKAGE = """
import importlib.util as u, json, sys, time
s = u.spec_from_file_location("verl_tool_host", sys.argv[1]); m = u.module_from_spec(s)
sys.modules["verl_tool_host"] = m; s.loader.exec_module(m)
from verl_tool_host.kinds import load_kind
name, make, action, at_once, steps, episodes = json.loads(sys.argv[2])
maker, played, began = load_kind(name), 0, time.perf_counter()
began = time.perf_counter()
for first in range(0, episodes, at_once):
    games = [maker(make) for _ in range(at_once)]
    for number, game in enumerate(games):
        game.begin(first + number)
    for step in range(steps):
        for game in games:
            game.step(action % (step + 1) if "%" in action else action)
    for game in games:
        game.close()
print(episodes * steps / (time.perf_counter() - began))
"""


@dataclass(frozen=True)
class Game:
    """A game that does not end within the steps, and what to play in it."""

    name: str
    action: str
    """``%d`` is the number of the step, from 1."""
    make: dict[str, Any] = field(default_factory=dict)
    peer: str | None = None
    """Virtual environment of the package; None: ours."""


LONG_GAME = {"min_number": 1000, "max_number": 2000, "max_turns": 10**6}
GAMES = (
    Game(f"{OWN_GAME}:GuessTheNumber", r"\boxed{%d}", LONG_GAME),
    Game("gem:game:GuessTheNumber-v0-easy", r"\boxed{%d}", LONG_GAME, "gem"),
    Game("textarena:GuessTheNumber-v0", "[%d]", {"max_number": 10**9, "max_turns": 10**6}, "textarena"),
    Game("skyrl_gym:gsm8k_multi_turn", "#### %d", {"prompt": [{"role": "user", "content": "?"}],
         "extras": {"reward_spec": {"ground_truth": "-1"}, "max_turns": 10**6}}, "skyrl_gym"),
)  # fmt: skip


@dataclass(frozen=True)
class GameSpeed:
    """One line of the table."""

    game: str
    at_once: int
    package: float
    """Steps a second."""
    host: float
    begin_ms: float
    """Mean time until the first observation, with so many beginning at once."""
    memory_mb: float
    """Memory that a live episode adds, proportional set size, megabytes of 2**20 bytes."""


def measure_package(python: str, game: Game, at_once: int, steps: int, episodes: int) -> float:
    """Steps a second in one process of the package."""
    request = json.dumps([game.name, game.make, game.action, at_once, steps, episodes])
    command = [python, "-I", "-c", PACKAGE, str(host.__file__), request]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return float(done.stdout.splitlines()[-1])


async def measure_host(python: str, game: Game, at_once: int, steps: int, episodes: int) -> tuple[float, float, float]:
    """Steps a second, milliseconds to begin, and megabytes of an episode."""
    tool = TextGame(environment=game.name, python=python, processes=at_once, max_steps=steps + 1)
    await tool.start()
    begin_seconds: list[float] = []

    async def play(number: int) -> None:
        began = time.perf_counter()
        session, _ = await tool.begin(f"t{number}", {"seed": number, "make": game.make})
        begin_seconds.append(time.perf_counter() - began)
        for step in range(steps):
            action = game.action % (step + 1) if "%" in game.action else game.action
            await tool.step(session, Call(tool.name, action, 0, len(action), DIRECT))
        await tool.end(session)

    began = time.perf_counter()
    for first in range(0, episodes, at_once):
        await asyncio.gather(*[play(first + number) for number in range(at_once)])
    rate = episodes * steps / (time.perf_counter() - began)
    assert tool._host is not None
    assert tool._host.pid is not None
    await asyncio.sleep(1.0)  # the processes of ended episodes exit
    before = usage_of_tree([tool._host.pid]).memory_bytes
    sessions = [(await tool.begin(f"m{n}", {"seed": n, "make": game.make}))[0] for n in range(at_once)]
    memory = (usage_of_tree([tool._host.pid]).memory_bytes - before) / at_once / 2**20
    for session in sessions:
        await tool.end(session)
    await tool.close()
    return rate, 1000 * sum(begin_seconds) / len(begin_seconds), memory


def main(
    peers: Annotated[Path | None, typer.Option(help="Folder of the packages' virtual environments.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Actions of an episode.")] = 20,
    episodes: Annotated[int, typer.Option(min=64, help="Episodes of each measurement.")] = 64,
    output: Annotated[Path | None, typer.Option(help="Write the figures there, JSON.")] = None,
) -> None:
    """Measure the games whose packages are there."""
    speeds = []
    table = Table(title=f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    for column in ("game", "at once", "package, steps/s", "host, steps/s", "begin, ms", "MB an episode"):
        table.add_column(column, justify="right")
    for game in GAMES:
        python = sys.executable if game.peer is None else str((peers or Path()) / game.peer / "bin" / "python")
        if game.peer is not None and (peers is None or not Path(python).exists()):
            print(f"{game.name}: left out, there is no {python}", file=sys.stderr)
            continue
        for at_once in AT_ONCE:
            package = measure_package(python, game, at_once, steps, episodes)
            rate, begin_ms, memory = asyncio.run(measure_host(python, game, at_once, steps, episodes))
            name = game.name.rpartition("/")[2]
            speeds.append(GameSpeed(name, at_once, package, rate, begin_ms, memory))
            table.add_row(name, str(at_once), f"{package:,.0f}", f"{rate:,.0f}", f"{begin_ms:.0f}", f"{memory:.1f}")
    Console().print(table)
    if output is not None:
        output.write_text(json.dumps([asdict(speed) for speed in speeds], indent=1), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
