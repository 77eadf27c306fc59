"""`python -m verl_tool.environments`: play an episode without a model, and make rows."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from toy_environments import GuessEnvironment, ShopEnvironment
from typer.testing import CliRunner, Result

from eval_service.evaluation.dataset import read_problems
from verl_tool.environments.__main__ import app
from verl_tool.environments.episode_check import play_episode
from verl_tool.protocol import ENVIRONMENT_FIELD
from verl_tool.verification import EnvironmentVerification

COIN = """
from verl_tool.environments.environment_tool import Environment
from verl_tool.protocol import Opening
from verl_tool.servers.tools import ToolOptions, ToolResult


class CoinOptions(ToolOptions):
    side: str = "heads"


class Coin(Environment):
    name = "coin"
    description = "Guess the side of a coin."
    Options = CoinOptions

    async def begin(self, trajectory_id, arguments):
        question = {"role": "user", "content": f"Coin {arguments.get('number', 0)}: which side?"}
        return None, Opening(messages=[question], every_turn=True)

    async def step(self, session, call):
        right = call.input.strip() == self.options.side
        return ToolResult("Yes." if right else "No.", done=True, reward=float(right), role="user")
"""


@pytest.fixture
def coin(tmp_path: Path) -> str:
    path = tmp_path / "coin.py"
    path.write_text(COIN)
    return str(path)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_an_episode_is_played_and_judged(coin: str) -> None:
    result = command("check", coin, "-o", "side=tails", "--arguments", '{"number": 7}', "--turn", "tails")
    assert result.exit_code == 0, result.output
    for words in ("Coin 7: which side?", "tails", "Yes.", "reward 1", "env_steps"):
        assert words in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "chess"], "tool 'chess' is unknown"),
        (["check", "calculator"], "is a tool and no environment"),
        (["check", "{coin}", "-o", "weight=3"], "no option 'weight'"),
        (["check", "{coin}", "-o", "weight"], "write NAME=VALUE"),
        (["check", "{coin}", "--arguments", "[1]"], "write a JSON object"),
        (["rows", "{coin}", "x", "--output", "x.parquet"], "makes no rows"),
    ],
)
def test_what_is_wrong_is_one_line(coin: str, arguments: list[str], words: str) -> None:
    result = command(*(each.replace("{coin}", coin) for each in arguments))
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


async def test_each_tool_of_an_opening_is_called_once() -> None:
    report = await play_episode(ShopEnvironment(), {"prices": {"…": 3}}, (), {"answer": 1}, 5.0)
    assert [result.observation.strip() for _, result, _ in report.answers[1:]] == [
        "<tool_response>\n3\n</tool_response>"
    ]
    assert report.is_judged


async def test_an_episode_that_cannot_begin_is_not_judged() -> None:
    guess = GuessEnvironment()
    report = await play_episode(guess, {"refuses": "unreachable"}, ("3",), {}, 5.0)
    assert not report.is_judged
    assert len(report.answers) == 1
    assert guess.ended == []


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_rows_of_different_arguments_are_read_as_they_were_made(tmp_path: Path, suffix: str) -> None:
    path, output = tmp_path / "coin_rows.py", tmp_path / f"rows{suffix}"
    path.write_text(
        COIN
        + """

def read_rows(source, first=0):
    for number in range(int(first), int(source)):
        environment = {"number": number} if number % 2 else {"side": [number]}
        yield {
            "prompt": [{"role": "system", "content": "Guess."}],
            "data_source": "coin",
            "reward_model": {"style": "environment", "ground_truth": {"n": number}},
            "extra_info": {"index": number, "tools_kwargs": {"environment": environment}},
        }
"""
    )
    result = command("rows", str(path), "9", "-o", "first=2", "--limit", "3", "--output", str(output))
    assert result.exit_code == 0, result.output
    problems = read_problems(output)
    assert [problem.tools_kwargs[ENVIRONMENT_FIELD] for problem in problems] == [
        {"side": [2]},
        {"number": 3},
        {"side": [4]},
    ]
    assert [problem.verification for problem in problems] == [
        EnvironmentVerification(data={"n": number}) for number in (2, 3, 4)
    ]
    if suffix == ".parquet":
        assert json.loads(pd.read_parquet(output)["reward_model"][0]["ground_truth"]) == {"n": 2}
