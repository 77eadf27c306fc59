"""Example trajectories for a tool of one's own, as lessons for a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")
pytest.importorskip("transformers")
pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
sys.path += [str(ROOT / "examples/train"), str(ROOT / "examples/train/acecoder")]

import own_traces  # noqa: E402
import tiny_model  # noqa: E402
from click.testing import Result  # noqa: E402
from traces import END  # noqa: E402
from typer import Typer  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

REVERSE = str(ROOT / "tests/servers/tools/data/reverse.py")
CALLED = {"prompt": "Reverse abc.", "turns": ["Well: <reverse>abc</reverse>", "It is cba."]}
MESSAGES = [{"role": "system", "content": "You reverse."}, {"role": "user", "content": "Reverse ab."}]
FINISHED = {"prompt": MESSAGES, "turns": ["<reverse>ab</reverse>", "It is ba. <finish></finish>"]}
GUESSED = {"prompt": "Reverse a.", "turns": ["It is a."]}


def written(folder: Path, *rows: object) -> Path:
    path = folder / "traces.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    return path


async def test_the_tool_s_own_answers_stand_between_the_turns(tmp_path: Path) -> None:
    own = own_traces.read_traces(written(tmp_path, CALLED, FINISHED, GUESSED))
    called, finished, guessed = await own_traces.with_observations(own, f"{REVERSE},finish")
    assert [(part.text, part.learned) for part in called] == [
        ("Well: <reverse>abc</reverse>", True),
        ("\n<result>\ncba\n</result>\n", False),
        (f"It is cba.{END}", True),
    ]
    assert [part.text for part in finished][2:] == ["It is ba. <finish></finish>"]
    assert [(part.text, part.learned) for part in guessed] == [(f"It is a.{END}", True)]
    assert own_traces.stops_in(own, f"{REVERSE},finish") == ["</reverse>", "</finish>"]


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (["<revers>abc</revers>", "x"], "turn 1 is no call of these tools .unknown tool 'revers'."),
        (["<reverse>abc</reverse>"], "turn 1 is a call, and the last turn: add the turn that follows"),
        (["<finish></finish>", "x"], "turn 1 ends the trajectory, and more turns follow"),
        (["<reverse>abc</reverse> and so", "x"], "turn 1 must end where its call ends, with one of .*</reverse>"),
    ],
)
async def test_a_trace_that_no_model_could_write_is_named(tmp_path: Path, turns: list[str], words: str) -> None:
    own = own_traces.read_traces(written(tmp_path, GUESSED, {"prompt": "?", "turns": turns}))
    with pytest.raises(own_traces.TraceError, match=f"line 2, {words}"):
        await own_traces.with_observations(own, f"{REVERSE},finish")


STOCK = """
from verl_tool.servers.tools import CallError, TrajectoryTools, tool
class Shop(TrajectoryTools):
    async def setup(self, trajectory):
        self.stock = dict(trajectory.extra.get("stock", {}))
    @tool
    async def take(self, item: str, count: int) -> str:
        \"\"\"Takes some of an item.\"\"\"
        if self.stock.get(item, 0) < count:
            raise CallError(f"there are only {self.stock.get(item, 0)} of {item}")
        self.stock[item] -= count
        return f"{self.stock[item]} left"
"""
TAKE = '<tool_call>{"name": "take", "arguments": {"item": "G84", "count": 2}}</tool_call>'


async def test_a_stateful_tool_begins_with_the_state_of_the_row(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(STOCK)
    line = {"prompt": "Take 2, then 2.", "turns": [TAKE, TAKE, "1 is left."]}
    own = own_traces.read_traces(written(tmp_path, {**line, "tools_kwargs": {"stock": {"G84": 5}}}))
    [trace] = await own_traces.with_observations(own, str(tmp_path / "shop.py"))
    assert "3 left" in trace[1].text
    assert "1 left" in trace[3].text
    with pytest.raises(own_traces.TraceError, match=r"turn 1: the call fails.*only 0 of G84.*tools_kwargs"):
        await own_traces.with_observations(own_traces.read_traces(written(tmp_path, line)), str(tmp_path / "shop.py"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a", "turns": ["a"], "stock": 1}', "has 'stock', which nobody reads"),
        ('{"prompt": "a", "turns": ["a"], "tools_kwargs": 1}', "tools_kwargs must be an object"),
        ("", "holds no traces"),
        ("{", "line 1 is no JSON"),
        ("[1]", "must have a prompt"),
        ('{"prompt": "a", "turns": []}', "must have a prompt .* and turns"),
        ('{"prompt": [{"role": "user"}], "turns": ["a"]}', "must have a prompt"),
        ('{"prompt": "a", "turns": ["a", ""]}', "every turn must be a text"),
    ],
)
def test_a_line_that_is_no_trace_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "traces.jsonl").write_text(text, "utf-8")
    with pytest.raises(own_traces.TraceError, match=words):
        own_traces.read_traces(tmp_path / "traces.jsonl")


def made(*arguments: str) -> Result:
    app = Typer()
    app.command()(tiny_model.main)
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --data, or --traces and --tool_type"),
        (["--traces", "traces.jsonl"], "give --data, or --traces and --tool_type"),
        (["--traces", "no_such.jsonl", "--tool_type", REVERSE], "no_such.jsonl holds no traces"),
    ],
)
def test_what_cannot_be_learned_from_is_told(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = made("--output", str(tmp_path / "model"), *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@pytest.mark.slow
def test_a_model_is_made_from_a_few_traces_by_one_command(tmp_path: Path) -> None:
    words = ("abc", "tool", "star")
    rows = [{"prompt": f"Reverse {w}.", "turns": [f"<reverse>{w}</reverse>", f"It is {w[::-1]}."]} for w in words]
    traces = ["--traces", str(written(tmp_path, *rows)), "--tool_type", REVERSE]
    small = ["--hidden", "64", "--batch_size", "8", "--target", "0.05"]
    result = made("--output", str(tmp_path / "model"), *traces, *small)
    assert result.exit_code == 0, result.output
    assert "actor_rollout_ref.agent.action_stop_tokens=['</reverse>']" in result.output
    assert (tmp_path / "model/model.safetensors").exists()
