"""Steps a second in environments of other systems: our client, our client behind a tool server, and their own client.

    python benchmarks/environments.py --peers .peers --json outputs/benchmarks/environments.json

Each package is ``PEERS/NAME/bin/python``. A step is one action that does next to nothing. All three play against the
same server, in rounds of 1, 8 and 64 episodes at once; beginning and end of an episode count. The tool server is the
one of the tests, in this process, and is called as the training calls it, one request a step.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "tests" / "helpers"))

from live_server import LiveServers  # noqa: E402
from peer_programs import PeerProgram  # noqa: E402

from verl_tool.client import ToolClient  # noqa: E402
from verl_tool.environments.environment_tool import Environment, EnvironmentState  # noqa: E402
from verl_tool.environments.nemo_gym import NemoGymEnvironment  # noqa: E402
from verl_tool.environments.openenv import OpenEnvEnvironment  # noqa: E402
from verl_tool.formats import Call  # noqa: E402
from verl_tool.formats.direct import DIRECT  # noqa: E402
from verl_tool.formats.find import find_calls  # noqa: E402
from verl_tool.protocol import ENVIRONMENT_FIELD  # noqa: E402
from verl_tool.servers.tools.base import Context  # noqa: E402

SERVERS = ROOT / "tests" / "environments"
COUNTER = json.loads((SERVERS / "data" / "nemo_gym.json").read_text())["counter"]
CALL = '<tool_call>\n{"name": "increment_counter", "arguments": {"count": 1}}\n</tool_call>'
AT_ONCE = (1, 8, 64)
PEER_SECONDS = 300.0


@dataclass(frozen=True)
class Case:
    """One adapter, a server for it, and an action that may be repeated."""

    package: str
    server: Path
    server_arguments: tuple[str, ...]
    make: Callable[..., Environment]
    arguments: Mapping[str, Any]
    """Of the row."""
    action: str


CASES = {
    case.package: case
    for case in (
        Case("openenv", SERVERS / "openenv_server.py", ("guess",), OpenEnvEnvironment, {"seed": 3}, "x"),
        Case(
            "nemo_gym",
            SERVERS / "nemo_gym_server.py",
            ("example_session_state_mgmt", "StatefulCounterResourcesServer"),
            NemoGymEnvironment,
            {"row": COUNTER["row"]},
            CALL,
        ),
    )
}


@dataclass(frozen=True)
class Speed:
    """Steps a second, and CPU time of the client's process for a step, milliseconds."""

    package: str
    at_once: int
    own_client: float
    own_client_cpu: float
    adapter: float
    adapter_cpu: float
    tool_server: float
    tool_server_cpu: float
    """With the loop's client, the tool server and the adapter in one process."""


async def rate_of(play: Callable[[int], Any], at_once: int, rounds: int, steps: int) -> tuple[float, float]:
    """Steps a second of `rounds` times `at_once` episodes, and CPU milliseconds a step; `play` is called with a number
    that is new each time."""
    await play(-1)
    began, used = time.perf_counter(), time.process_time()
    for number in range(rounds):
        await asyncio.gather(*(play(number * at_once + i) for i in range(at_once)))
    total = at_once * rounds * steps
    return total / (time.perf_counter() - began), 1000 * (time.process_time() - used) / total


async def play_adapter(environment: Environment, case: Case, steps: int, number: int) -> None:
    session, opening = await environment.begin(f"a{number}", case.arguments)
    state = EnvironmentState(session, opening)
    found = find_calls(case.action, environment.formats)
    for step in range(steps):
        context = Context(f"a{number}", step, state, action=case.action)
        await environment.run(found[0] if found else _whole(environment, case.action), context)
    await environment.end(session)


def _whole(environment: Environment, action: str) -> Call:
    return Call(environment.name, action, 0, len(action), DIRECT)


async def play_served(client: ToolClient, case: Case, steps: int, name: str) -> None:
    result = await client.call(name, "", step=0, extra={ENVIRONMENT_FIELD: dict(case.arguments)})
    assert result.fault is None, result.fault
    for step in range(steps):
        result = await client.call(name, case.action, step=step + 1)
        assert result.fault is None, result.fault
    await client.call(name, "", finish=True)


async def measure_own_client(
    peers: Path, url: str, case: Case, at_once: int, rounds: int, steps: int
) -> tuple[float, float]:
    source = (ROOT / "benchmarks" / "environments_peer.py").read_text()
    numbers = [str(number) for number in (at_once, rounds, steps)]
    process = await asyncio.create_subprocess_exec(
        str(peers / case.package / "bin" / "python"),
        "-c",
        source,
        case.package,
        url,
        json.dumps(case.arguments),
        *numbers,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), PEER_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    rate, cpu = output.split()[-2:]
    return float(rate), float(cpu)


async def measure(peers: Path, case: Case, steps: int, total_steps: int) -> list[Speed]:
    server = PeerProgram(peers / case.package / "bin" / "python", case.server, *case.server_arguments)
    servers = LiveServers()
    speeds = []
    await server.start()
    try:
        for at_once in AT_ONCE:
            rounds = max(1, total_steps // (at_once * steps))
            own = await measure_own_client(peers, server.url, case, at_once, rounds, steps)
            environment = case.make(url=server.url)
            adapter = await rate_of(lambda n, e=environment: play_adapter(e, case, steps, n), at_once, rounds, steps)
            await environment.close()
            live = await servers.start([case.make(url=server.url)])
            async with ToolClient(live.observations_url) as client:
                name = f"s{at_once}-"
                served = await rate_of(
                    lambda n, c=client, s=name: play_served(c, case, steps, f"{s}{n}"), at_once, rounds, steps
                )
            await servers.stop()
            speeds.append(Speed(case.package, at_once, *own, *adapter, *served))
    finally:
        await servers.stop()
        await server.kill()
    return speeds


def main(
    peers: Annotated[Path, typer.Option(help="Folder with the packages' virtual environments.")],
    only: Annotated[list[str] | None, typer.Option(help="Names of packages; all without.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of one episode.")] = 20,
    total_steps: Annotated[int, typer.Option(help="Steps of one figure, at least one round.")] = 2000,
    output: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
) -> None:
    """Measure each adapter beside the package's own client."""
    speeds = [speed for name in only or CASES for speed in asyncio.run(measure(peers, CASES[name], steps, total_steps))]
    table = Table("environment", "episodes at once", "own client", "adapter", "through a tool server")
    for speed in speeds:
        cells = [
            f"{speed.own_client:.0f} ({speed.own_client_cpu:.2f} ms)",
            f"{speed.adapter:.0f} ({speed.adapter_cpu:.2f} ms)",
            f"{speed.tool_server:.0f} ({speed.tool_server_cpu:.2f} ms)",
        ]
        table.add_row(speed.package, str(speed.at_once), *cells)
    Console().print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps([asdict(speed) for speed in speeds], indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
