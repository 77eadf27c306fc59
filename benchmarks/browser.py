"""Episodes a second of MiniWoB's click-test in our browser, beside browsergym-miniwob, and memory of live contexts.

    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install browsergym-miniwob miniwob
    python benchmarks/browser.py --peer /tmp/peer/bin/python

Both drive Debian's chromium. Ours has one for all contexts; BrowserGym has one environment a process, each with a
chromium of its own. An episode is a reset, an observation and one click. The two take turns. BrowserGym's observation
holds a screenshot and the whole DOM besides the accessibility tree; ours is text.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from pathlib import Path
from typing import Annotated

import typer
from load import usage_of_tree
from rich.console import Console
from rich.table import Table

from verl_tool.browser.isolation import find_chromium
from verl_tool.environments.miniwob import MiniWobEnvironment, pages_folder
from verl_tool.formats import HERMES, Call

console = Console()
_PAGE = "click-test"
_PEER = Path(__file__).with_name("browser_peer.py")
_PEER_SECONDS = 600.0


async def play_episode(environment: MiniWobEnvironment, seed: int) -> bool:
    """Solve one task, and return whether the page says so."""
    session, opening = await environment.begin(f"t{seed}", {"page": _PAGE, "seed": seed})
    number = re.search(r"\[(\d+)\] button", opening.messages[0]["content"])
    action = f"click({number[1] if number else 0})"
    result = await environment.step(session, Call("", action, 0, len(action), HERMES))
    await environment.end(session)
    return result.reward == 1.0


async def episodes_per_second(environment: MiniWobEnvironment, episodes: int, contexts: int) -> float:
    """Play all, `contexts` at a time, after one round that is not counted."""
    await asyncio.gather(*(play_episode(environment, seed) for seed in range(contexts)))
    waiting = iter(range(episodes))

    async def worker() -> int:
        return sum([await play_episode(environment, seed) for seed in waiting])

    began = time.monotonic()
    solved = sum(await asyncio.gather(*(worker() for _ in range(contexts))))
    if solved != episodes:
        raise typer.BadParameter(f"only {solved} of {episodes} episodes were solved")
    return episodes / (time.monotonic() - began)


async def peer_episodes_per_second(python: Path, episodes: int, contexts: int) -> float:
    """The same with BrowserGym, one process a context."""
    folder, chromium = pages_folder(None), find_chromium(None)
    arguments = [str(folder), str(chromium), str(episodes), str(contexts)]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        str(python), str(_PEER), *arguments, stdout=asyncio.subprocess.PIPE, env=environment
    )
    output, _ = await asyncio.wait_for(process.communicate(), _PEER_SECONDS)
    runs = json.loads(output.splitlines()[-1])
    return sum(solved for _, solved in runs) / max(seconds for seconds, _ in runs)


async def memory_per_context(environment: MiniWobEnvironment, contexts: int) -> tuple[float, float]:
    """Megabytes (proportional set size) of chromium and its driver with no and with each of `contexts` pages."""
    before = usage_of_tree([os.getpid()]).memory_bytes
    begun = [await environment.begin(f"m{seed}", {"page": _PAGE, "seed": seed}) for seed in range(contexts)]
    after = usage_of_tree([os.getpid()]).memory_bytes
    for session, _ in begun:
        await environment.end(session)
    return before / 2**20, (after - before) / contexts / 2**20


async def run(episodes: int, rounds: int, contexts: list[int], live: int, peer: Path | None) -> None:
    """Measure, and print a table."""
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for count in contexts:
            environment = MiniWobEnvironment(describe_actions=False)
            await environment.start()
            rates.setdefault(("verl-tool", count), []).append(await episodes_per_second(environment, episodes, count))
            await environment.close()
            if peer is not None:
                found = await peer_episodes_per_second(peer, max(episodes // 4, count), count)
                rates.setdefault(("browsergym-miniwob", count), []).append(found)
    environment = MiniWobEnvironment(describe_actions=False, max_contexts=live)
    await environment.start()
    base, each = await memory_per_context(environment, live)
    await environment.close()
    table = Table("who", "contexts", "episodes/s (median)", "all rounds")
    for (who, count), values in rates.items():
        middle = sorted(values)[len(values) // 2]
        table.add_row(who, str(count), f"{middle:.2f}", ", ".join(f"{value:.2f}" for value in values))
    console.print(table)
    console.print(
        f"memory: {base:.0f} MB without a page (this process included), {each:.1f} MB for each of {live} pages"
    )
    console.print(f"load average: {os.getloadavg()}")


def main(
    episodes: Annotated[int, typer.Option(help="Of ours in each round; a quarter of that of the peer.")] = 64,
    rounds: int = 3,
    live: Annotated[int, typer.Option(help="Contexts for the measurement of memory.")] = 16,
    peer: Annotated[Path | None, typer.Option(help="Python with browsergym-miniwob.")] = None,
) -> None:
    """Compare episodes a second at 1 and 8 contexts, and measure the memory of live contexts."""
    asyncio.run(run(episodes, rounds, [1, 8], live, peer))


if __name__ == "__main__":
    typer.run(main)
