"""The parts of the eval endpoint's benchmark that need no engine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType

import pytest
from script_module import load_script

pytest.importorskip("transformers")
pytest.importorskip("torch")

BENCHMARK = Path(__file__).parents[2] / "benchmarks/eval_service.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script puts the project's folder in place of its own
    return load_script("eval_service_benchmark", BENCHMARK)


@pytest.mark.slow
def test_its_model_is_of_the_size_that_was_asked_for(benchmark: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    benchmark.make_model(tmp_path, 64, 1)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers) == (64, 1)
    assert config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path))


async def test_the_load_is_never_above_its_concurrency_and_adds_up(benchmark: ModuleType) -> None:
    running = most = 0

    async def one(i: int) -> object:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return benchmark.Answer(model_tokens=i, first_token_seconds=i / 1000, calls=1)

    run = await benchmark.load(one, 9, 4)
    assert most == 4
    assert (run.model_tokens, run.calls, run.first_token_ms) == (36, 9, pytest.approx(4.0))


def test_the_overhead_is_told_against_the_bare_engine(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.console.file = sys.stdout

    def runs(*tokens: int, first: float = 10.0) -> list[object]:
        return [benchmark.Run(1.0, each, first) for each in tokens]

    benchmark.show(
        {
            "bare": runs(100, 200, 400),  # the machine got faster; round by round, the endpoint is 2% slower
            "endpoint": runs(98, 196, 392, first=11.0),
            "bare tools": runs(100, 100, 100),
            "endpoint tools": runs(50, 90, 110),
        }
    )
    told = capsys.readouterr().out
    assert "tokens/s over the bare engine: 0.98x (0.98 to 0.98)" in told
    assert "first token over the bare engine: 1.10x (1.10 to 1.10)" in told
    assert "over a loop of the client: 0.90x (0.50 to 1.10)" in told


async def test_loads_go_back_and_forth_and_the_first_round_warms(benchmark: ModuleType) -> None:
    order: list[str] = []

    def load(name: str) -> object:
        async def one() -> object:
            order.append(name)
            return benchmark.Run(1.0, len(order), 0.0)

        return one

    runs = await benchmark.in_rounds({"a": load("a"), "b": load("b")}, 2)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert {name: [run.model_tokens for run in each] for name, each in runs.items()} == {"a": [3, 6], "b": [4, 5]}
