"""A tiny language model that has just begun to use a calculator: `python examples/train/calculator/warmup.py`.

A tokenizer and a Qwen3-style model are made from scratch and trained by supervised learning on traces in TRL's format.
As with a base model that was shown a few examples, the model knows how to call the tool and mostly does not: in most
traces it answers out of its head, near the truth and nearly always wrong. Learning stops as soon as a call that was
begun is carried through to the right answer with the wanted probability; that it pays to begin one is left to
reinforcement learning.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import typer
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "data_preprocess")]
from calculator import Problem, problem
from from_scratch import Row, WarmUp, encode, make_model, make_tokenizer, once_begun, warm_up

Trace = tuple[tuple[str, bool], ...]
"""A solved problem's text in order, each part with whether the model writes it."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}{% endfor %}"
)
VOCABULARY = 320


def with_tool(p: Problem) -> Trace:
    """The calculator is asked and its answer submitted: right."""
    call = f"<request><SimpleCalculatorTool>{p.expression}<call>"
    observation, answer = f"{p.answer}<response>", f"Result={p.answer}<submit>"
    return ((f"{p.question}\n", False), (call, True), (observation, False), (answer, True))


def by_head(p: Problem, rng: random.Random) -> Trace:
    """The problem is said again, and an answer about a tenth off is submitted."""
    guess = float(p.answer) * rng.gauss(1, 0.1)
    return ((f"{p.question}\n", False), (f"{p.expression} is about Result={guess:.1f}<submit>", True))


class Traces(IterableDataset):
    """Endless random traces, of which the part `tool_share` uses the tool."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, tool_share: float) -> None:
        self.tokenizer, self.seed, self.tool_share = tokenizer, seed, tool_share

    def __iter__(self) -> Iterator[Row]:
        rng = random.Random(self.seed)
        while True:
            p = problem(rng)
            yield encode(self.tokenizer, with_tool(p) if rng.random() < self.tool_share else by_head(p, rng))


def calculator_tokenizer() -> PreTrainedTokenizerBase:
    """Learned from traces; the same for all seeds."""
    rng = random.Random(0)
    texts = (text for _ in range(2000) for text, _ in with_tool(problem(rng)))
    return make_tokenizer(texts, VOCABULARY, CHAT_TEMPLATE)


def main(
    output: Path = typer.Option(Path("data/calculator/model"), "--output", help="Folder for the model."),
    target: float = typer.Option(
        0.93, "--target", min=0.0, max=1.0, help="Stop when a call, once begun, comes out right so often, sampled."
    ),
    tool_share: float = typer.Option(0.3, "--tool_share", min=0.01, max=1.0, help="Part of traces that use the tool."),
    seed: int = typer.Option(0, "--seed"),
) -> None:
    """Make and warm up the calculator model. Exits with 1 if it does not reach `target`."""
    tokenizer = calculator_tokenizer()
    model = make_model(tokenizer, hidden=128, layers=3, seed=seed)
    held = [once_begun(row) for row in islice(Traces(tokenizer, 10**6 + seed, tool_share=1.0), 256)]
    how = WarmUp(target, max_steps=400, learning_rate=2e-3, seed=seed, batch_size=64)
    warm_up(model, tokenizer, Traces(tokenizer, seed, tool_share), held, how, output)


if __name__ == "__main__":
    typer.run(main)
