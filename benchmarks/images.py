r"""Crops of images over HTTP, beside verl-tool's `pixel_reasoner`, in one run.

    python benchmarks/images.py --peer-url http://127.0.0.1:5100

The script starts this project's server twice: in one process (`--embedded`), as verl-tool's is, and on Ray with its
ingress. That of TIGER-AI-Lab/verl-tool is started before, as one server without a
router before it, in an environment that also holds torch, torchvision and verl, which its tool imports:

    git clone https://github.com/TIGER-AI-Lab/verl-tool peer && cd peer && python3.11 -m venv .venv
    .venv/bin/pip install fire fastapi uvicorn httptools uvloop httpx ray psutil regex requests tqdm \
        torch torchvision verl
    .venv/bin/python -m verl_tool.servers.tool_server --tool_type pixel_reasoner --host 127.0.0.1 --port 5100

Each trajectory asks for `--turns` crops of one photograph-like JPEG of `--side` pixels a side. As its own loop does,
verl-tool is sent the prompt's image with every call; this server is sent it with the first one. verl-tool takes a tenth
of the image more on each side of a box, so it is asked for a box that is smaller by that: both answer with the same
area, as a JPEG. Trajectories are finished at their end. Throughput is crops a second; read the ratios.
"""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from load import Cell, in_turn, markdown, measure, print_cells, write_json
from PIL import Image
from rich.console import Console
from served_tools import Connections, running, server_command
from sessions import listener

from verl_tool.content.parts import encode_image, to_wire
from verl_tool.protocol import IMAGES_FIELD
from verl_tool.servers.serve.ports import free_ports

console = Console(stderr=True)
OURS, ON_RAY, PEER = "this server", "on Ray", "verl-tool"
PADDING = 0.1
"""Of the image's sides, that verl-tool adds on each side of a box."""
CROP = 0.3
"""Of the image's sides, what a crop shows."""


def photograph(side: int) -> str:
    """A JPEG that compresses as photographs do: noise on all scales. As a data URI."""
    random, scale = np.random.default_rng(0), 1.0
    pixels = np.zeros((side, side, 3))
    for cells in (4, 16, 64, side):
        noise = Image.fromarray((random.random((cells, cells, 3)) * 255).astype(np.uint8)).resize((side, side))
        pixels += scale * np.asarray(noise, dtype=float)
        scale /= 3
    picture = Image.fromarray((255 * pixels / pixels.max()).astype(np.uint8))
    return to_wire(encode_image(picture, "image/jpeg", quality=90))


def call(corner: float, side: int, padding: float) -> str:
    """The model's text, for a crop whose upper left corner is so far from the image's, as a share of its side."""
    box = [round(side * (corner + edge)) for edge in (padding, padding, CROP - padding, CROP - padding)]
    arguments = {"bbox_2d": box, "target_image": 1}
    return f"<tool_call>\n{json.dumps({'name': 'crop_image', 'arguments': arguments})}\n</tool_call>"


class Asked:
    """Trajectories of one system."""

    def __init__(self, connections: Connections, image: str, side: int, turns: int, is_peer: bool) -> None:
        self._connections, self._image, self._side, self._turns = connections, image, side, turns
        self._padding, self._every_turn = (PADDING, True) if is_peer else (0.0, False)
        self.trajectories = 0

    async def trajectory(self, number: int) -> int:
        """Ask for all crops of one; how many came back as images of the right size."""
        trajectory_id, right = uuid.uuid4().hex, 0
        for turn in range(self._turns):
            corner = (1 - CROP) * turn / max(1, self._turns - 1)
            extra = {IMAGES_FIELD: [self._image]} if turn == 0 or self._every_turn else {}
            answer = await self._post(trajectory_id, call(corner, self._side, self._padding), extra)
            right += self._is_right(answer["observations"][0])
        await self._post(trajectory_id, "", {}, finish=True)
        self.trajectories += 1
        return right

    @property
    def kilobytes(self) -> float:
        """Of JSON that a trajectory has sent and received."""
        return self._connections.bytes / max(1, self.trajectories) / 1024

    async def _post(self, trajectory_id: str, action: str, extra: dict[str, Any], finish: bool = False) -> dict:
        body = {"trajectory_ids": [trajectory_id], "actions": [action]}
        body |= {"extra_fields": [{**extra, "finish": True} if finish else extra], "finish": [finish]}
        return await self._connections.post(body)

    def _is_right(self, observation: Any) -> bool:
        if not isinstance(observation, dict) or not observation.get("image"):
            return False
        shown = observation["image"]
        shown = shown[0] if isinstance(shown, list) else shown
        wanted = CROP * self._side
        # verl-tool brings sides to multiples of 28.
        return abs(_width_of(shown) - wanted) < 28 and shown.startswith("data:image/jpeg")


def _width_of(uri: str) -> int:
    with Image.open(BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
        return image.width


async def compare(
    systems: dict[str, tuple[Asked, int]], clients: list[int], seconds: float, rounds: int, turns: int
) -> list[Cell]:
    """Each system with so many trajectories at once, in turn."""
    cells: list[Cell] = []
    for count in clients:
        measurements: list[Callable[[], Awaitable[Cell]]] = [
            partial(
                measure, asked.trajectory, system=name, snippet="crops", concurrency=count, seconds=seconds,
                executions_per_call=turns, pids=[pid],
            )
            for name, (asked, pid) in systems.items()
        ]  # fmt: skip
        cells += await in_turn(measurements, rounds, PEER if PEER in systems else OURS)
    return cells


async def run(
    peer_url: str | None, clients: list[int], seconds: float, rounds: int, side: int, turns: int
) -> tuple[list[Cell], dict[str, float]]:
    """All figures, and the kilobytes of JSON a trajectory by system."""
    image = photograph(side)
    systems: dict[str, tuple[Asked, int]] = {}
    async with AsyncExitStack() as stack:
        for name, options, port in zip((OURS, ON_RAY), (["--embedded"], []), free_ports(2), strict=True):
            url = f"http://127.0.0.1:{port}"
            command = [*server_command(port, "pixel_reasoner"), *options]
            server = await stack.enter_async_context(running(command, url + "/health"))
            connections = await stack.enter_async_context(Connections(url))
            systems[name] = (Asked(connections, image, side, turns, is_peer=False), server.pid)
        if peer_url is not None:
            connections = await stack.enter_async_context(Connections(peer_url))
            systems[PEER] = (Asked(connections, image, side, turns, is_peer=True), listener(peer_url))
        for name, (asked, _) in systems.items():
            if (right := await asked.trajectory(0)) != turns:
                raise RuntimeError(f"{name} answered {right} of {turns} crops of the first trajectory as it should")
        cells = await compare(systems, clients, seconds, rounds, turns)
    return cells, {name: asked.kilobytes for name, (asked, _) in systems.items()}


def main(
    peer_url: Annotated[str | None, typer.Option(help="Of verl-tool's server.")] = None,
    clients: Annotated[str, typer.Option(help="Trajectories at once, separated by commas.")] = "1,8,64",
    seconds: Annotated[float, typer.Option(help="Of each measurement.")] = 8.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    side: Annotated[int, typer.Option(min=100, help="Of the image, in pixels.")] = 1024,
    turns: Annotated[int, typer.Option(min=1, help="Of a trajectory.")] = 8,
    out: Annotated[Path, typer.Option()] = Path("outputs/benchmarks/images.json"),
) -> None:
    """Measure, print a table, write JSON."""
    counts = [int(count) for count in clients.split(",")]
    cells, kilobytes = asyncio.run(run(peer_url, counts, seconds, rounds, side, turns))
    print_cells(cells, f"crops of an image of {side} x {side} pixels, {turns} a trajectory")
    print(markdown(cells))
    lines = [f"{name}: {size:.0f} KiB of JSON a trajectory" for name, size in kilobytes.items()]
    if PEER in kilobytes:
        lines.append(f"{kilobytes[OURS] / kilobytes[PEER]:.0%} of verl-tool's bytes")
    for line in lines:
        console.print(line, highlight=False)
    write_json(out, cells, side=side, turns=turns, kilobytes_a_trajectory=kilobytes)


if __name__ == "__main__":
    typer.run(main)
