"""What the eval endpoint costs over the bare engine: `python benchmarks/eval_service.py`.

A model with random weights, large enough that a step takes as long as a real model's on a GPU, answers `--concurrency`
clients at a time.

- No tool: the endpoint against `vllm serve` with the same settings. Both generate the same tokens (greedy), and each
  client reads a stream, so that the first token's time is known.
- Tools: the endpoint against the same loop run by the client over `vllm serve`; neither streams. Turns end at any of a
  few letters, and each is sent to the tool server, so that every conversation makes calls whatever the model writes.

Bare engine and endpoint are both up, and take turns; every other round begins with the other one. Each round gives a
ratio of the two, and the median of the ratios is told with the quarter of them on either side: a machine that is slower
for a minute is slower for both. The first round only warms: an engine prepares anew for each size of batch that it has
not met. Prints a table and writes JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

# This file bears the name of the package that it measures: look for that in the project's folder, not beside this file.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from eval_service.engines.completions_engine import CompletionsEngine  # noqa: E402
from eval_service.model.tokenizer import load_tokenizer  # noqa: E402
from eval_service.service import GenerationJob, Service  # noqa: E402
from eval_service.settings import CompletionsSettings, Sampling  # noqa: E402
from verl_tool.agent_loop.options import EpisodeOptions  # noqa: E402
from verl_tool.client import ToolClient  # noqa: E402
from verl_tool.http.supervised_server import SupervisedServer, serve_command  # noqa: E402
from verl_tool.servers.serve.ports import free_ports  # noqa: E402

ROOT = Path(__file__).parents[1]
START_SECONDS = 900.0
ENGINE_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE=2", "TORCHDYNAMO_DISABLE=1", "VLLM_NO_USAGE_STATS=1")
STOPS = list("aeio")
"""Turns end at one of these: one token in about eighty of those that a random model draws. vLLM's server takes four."""
CONTEXT = 1024
console = Console()


@dataclass(frozen=True)
class Run:
    """One load on one server."""

    seconds: float
    model_tokens: int
    first_token_ms: float
    """Median over the conversations."""
    calls: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.model_tokens / self.seconds


@dataclass(frozen=True)
class Answer:
    """What one conversation gave."""

    model_tokens: int
    first_token_seconds: float
    calls: int = 0


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """A model of random weights with the calculator's tokenizer."""
    script = (
        "import sys; sys.path.insert(0, 'examples/train/calculator'); import warmup;"
        "t = warmup.calculator_tokenizer(); m = warmup.make_model(t, int(sys.argv[2]), int(sys.argv[3]), 0);"
        "m.save_pretrained(sys.argv[1]); t.save_pretrained(sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(folder), str(hidden), str(layers)], cwd=ROOT, check=True, timeout=600
    )


def running(url: str, log: Path, *command: str) -> SupervisedServer:
    """A Python module that serves `url`."""
    return SupervisedServer(
        ["env", f"--chdir={ROOT}", "-u", "PYTHONDONTWRITEBYTECODE", *ENGINE_VARIABLES, sys.executable, "-m", *command],
        url,
        log,
        start_timeout=START_SECONDS,
        max_restarts=0,
    )


def bare_engine(model: Path, folder: Path) -> SupervisedServer:
    """`vllm serve`."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = ["vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "bench", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(CONTEXT), "--generation-config", "vllm", "--disable-uvicorn-access-log"]
    command += ["--logprobs-mode", "processed_logprobs"]
    return running(url, folder / "vllm.log", *command)


def endpoint(model: Path, folder: Path, tool_url: str) -> SupervisedServer:
    """The endpoint."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = ["eval_service.app", "--model", str(model), "--port", str(port)]
    command += ["--served_model_name", "bench", "--tool_server_url", tool_url, "--dtype", "float32"]
    command += ["--max_model_len", str(CONTEXT), "--action_stop_tokens", json.dumps(STOPS)]
    command += ["--max_turns", "4"]
    return running(url, folder / "endpoint.log", *command)


async def streamed(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """One stream of ``/v1/completions``, read to its end."""
    began, first, usage = time.perf_counter(), 0.0, {}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - began
            if b'"usage":{' in line:
                usage = json.loads(line[6:])["usage"]
    return Answer(usage["completion_tokens"], first, usage.get("tool_calls", 0))


async def at_once(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """One answer of ``/v1/completions``, told when it is whole."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        usage = (await response.json())["usage"]
    return Answer(usage["completion_tokens"], 0.0, usage["tool_calls"])


async def load(one: Callable[[int], Awaitable[Answer]], requests: int, concurrency: int) -> Run:
    """`requests` conversations, `concurrency` at a time."""
    places = asyncio.Semaphore(concurrency)

    async def placed(i: int) -> Answer:
        async with places:
            return await one(i)

    began = time.perf_counter()
    answers = await asyncio.gather(*(placed(i) for i in range(requests)))
    seconds = time.perf_counter() - began
    first = statistics.median(answer.first_token_seconds for answer in answers) * 1e3
    return Run(seconds, sum(a.model_tokens for a in answers), first, sum(a.calls for a in answers))


def prompt(i: int) -> str:
    return f"What is {i}.5+{i % 7}?\n"


async def without_tools(url: str, tokens: int, requests: int, concurrency: int, further: dict[str, Any]) -> Run:
    """Plain completions, greedy, streamed. `further` fields are only for the server that has tools."""
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=900)) as session:

        async def one(i: int) -> Answer:
            body = {"model": "bench", "prompt": prompt(i), "max_tokens": tokens, "temperature": 0, "stream": True}
            body |= {"stream_options": {"include_usage": True}}
            return await streamed(session, url, body | further)

        return await load(one, requests, concurrency)


async def with_tools(url: str, requests: int, concurrency: int) -> Run:
    """Conversations with calls; the endpoint runs the loop."""
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=900)) as session:

        async def one(i: int) -> Answer:
            body = {"model": "bench", "prompt": prompt(i), "max_tokens": 256, "temperature": 1, "seed": i}
            return await at_once(session, url, body)

        return await load(one, requests, concurrency)


async def with_tools_by_client(url: str, tool_url: str, model: Path, requests: int, concurrency: int) -> Run:
    """The same conversations; the loop runs here, over the bare engine."""
    settings = {"action_stop_tokens": STOPS, "max_turns": 4, "max_model_len": CONTEXT, "tool_server_url": tool_url}
    options = EpisodeOptions.load(settings)
    tokenizer = load_tokenizer(str(model))
    bare = CompletionsSettings(url=url, model="bench", max_connections=concurrency)
    engine = await CompletionsEngine.connect(bare, tokenizer.vocab_size)
    async with ToolClient(tool_url, **options.client_settings()) as tools:  # type: ignore[arg-type]
        service = Service(engine, tokenizer, tools, options)

        async def one(i: int) -> Answer:
            params = Sampling(temperature=1.0).params() | {"seed": i}
            ask = GenerationJob(
                f"bench-{time.monotonic_ns()}-{i}", tokenizer.encode(prompt(i)), params, token_limit=256
            )
            trajectory = await service.run(ask)
            return Answer(sum(trajectory.response_mask), 0.0, len(trajectory.calls))

        run = await load(one, requests, concurrency)
    await engine.close()
    return run


async def in_rounds(loads: dict[str, Callable[[], Awaitable[Run]]], rounds: int) -> dict[str, list[Run]]:
    """Each load once a round, the order turned round every time; the first round is not told."""
    runs: dict[str, list[Run]] = {name: [] for name in loads}
    for number in range(rounds + 1):
        for name in list(loads)[:: 1 if number % 2 else -1]:
            run = await loads[name]()
            console.print(f"round {number}: {name}: {run.tokens_per_second:.0f} tokens/s, {run.first_token_ms:.0f} ms")
            if number:
                runs[name].append(run)
    return runs


def main(
    hidden: Annotated[int, typer.Option("--hidden", help="Width of the model; a multiple of 32.")] = 512,
    layers: Annotated[int, typer.Option("--layers")] = 8,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1)] = 32,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Conversations of one run.")] = 64,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens of an answer without tools.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=3)] = 12,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> None:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        make_model(model, hidden, layers)
        (port,) = free_ports(1)
        tool_url = f"http://127.0.0.1:{port}"
        with (
            SupervisedServer(serve_command("calculator", port), tool_url, folder / "tools.log"),
            bare_engine(model, folder) as bare,
            endpoint(model, folder, tool_url) as served,
        ):
            no_tool = {"tool_choice": "none"}
            loads = {
                "bare": lambda: without_tools(bare.url, tokens, requests, concurrency, {}),
                "endpoint": lambda: without_tools(served.url, tokens, requests, concurrency, no_tool),
            }
            runs = asyncio.run(in_rounds(loads, rounds))
            loads = {
                "bare tools": lambda: with_tools_by_client(bare.url, tool_url, model, requests, concurrency),
                "endpoint tools": lambda: with_tools(served.url, requests, concurrency),
            }
            runs |= asyncio.run(in_rounds(loads, rounds))
    show(runs)
    if json_path is not None:
        json_path.write_text(json.dumps({name: [asdict(run) for run in each] for name, each in runs.items()}, indent=2))


def show(runs: dict[str, list[Run]]) -> None:
    """The table, and what to read in it."""
    table = Table("load", "model tokens/s", "first token, ms", "model tokens", "calls", title="eval endpoint: medians")
    for name, each in runs.items():
        speed, first = statistics.median(speeds(each)), statistics.median(run.first_token_ms for run in each)
        told = f"{first:.0f}" if first else "-"
        table.add_row(name, f"{speed:.0f}", told, str(each[0].model_tokens), str(each[0].calls))
    console.print(table)
    first_tokens = [[run.first_token_ms for run in runs[name]] for name in ("endpoint", "bare")]
    console.print(f"no tool, tokens/s over the bare engine: {ratio(speeds(runs['endpoint']), speeds(runs['bare']))}")
    console.print(f"no tool, first token over the bare engine: {ratio(*first_tokens)}")
    by_client = ratio(speeds(runs["endpoint tools"]), speeds(runs["bare tools"]))
    console.print(f"with tools, tokens/s over a loop of the client: {by_client}")


def speeds(runs: Sequence[Run]) -> list[float]:
    return [run.tokens_per_second for run in runs]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Median and quartiles of the rounds' ratios."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return f"{middle:.2f}x ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    typer.run(main)
